"""Sequences in an order in which those that begin alike are next to each other."""

from collections.abc import Iterator, Sequence


def order_by_beginnings(sequences: Sequence[list[int]]) -> Iterator[tuple[int, int]]:
    """Yield (index, tokens with which the one before it begins as well) of each sequence, in that order."""
    before: list[int] = []
    for index in sorted(range(len(sequences)), key=sequences.__getitem__):
        yield index, _count_common(before, sequences[index])
        before = sequences[index]


def _count_common(one: list[int], other: list[int]) -> int:
    """The number of tokens with which both begin."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
