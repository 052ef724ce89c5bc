"""A rollout's rows as prompts and completions to score, and scores as columns of the rollout."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import PlacedPicture
from rollout_engine.batches.layout import Place, full_places, scored_mask

_VALUES = 1 << 24
"""Log-probs that one call returns at most, unless a single row has more: 64 MiB."""


class ScoredRow(NamedTuple):
    """One row of a rollout that has sampled tokens."""

    index: int  # type: ignore[assignment]  # hides a method of tuples
    """Number of the sequence in the batch."""
    place: Place
    """Place of its tokens in full."""
    first: int
    """Position of its first sampled token."""
    token_ids: list[int]

    @property
    def prompt(self) -> list[int]:
        return self.token_ids[: self.first]

    @property
    def completion(self) -> list[int]:
        """All tokens from the first sampled one on, those of an environment included."""
        return self.token_ids[self.first :]

    @property
    def own(self) -> Place:
        """Place of the completion."""
        row, columns = self.place
        return row, slice(columns.start + self.first, columns.stop)


class ScoredBatch:
    """The rows of a rollout, in either layout, that have tokens to score."""

    def __init__(self, batch: TensorDictBase) -> None:
        self._scored = scored_mask(batch)
        self.shape = batch["tokens", "full"].shape
        self.rows: list[ScoredRow] = []
        tokens = batch["tokens", "full"]
        for index, place in enumerate(full_places(batch)):
            sampled = self._scored[place].nonzero().flatten()
            if len(sampled):
                self.rows.append(ScoredRow(index, place, int(sampled[0]), tokens[place].tolist()))
        pictures = batch.get("pictures").tolist() if "pictures" in batch.keys() else None
        self.pictures: list[Sequence[PlacedPicture]] | None = None
        """Those of each row; None if the rollout has none."""
        if pictures is not None:
            self.pictures = [pictures[row.index] for row in self.rows]

    @property
    def pairs(self) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts and completions."""
        return [row.prompt for row in self.rows], [row.completion for row in self.rows]

    def take(self, values: Tensor) -> Tensor:
        """Values [B, T, ...] or [1, N, ...] -> those of all completions, end to end."""
        return torch.cat([values[row.own] for row in self.rows] or [values.flatten(0, 1)[:0]])

    def spread(self, values: np.ndarray, fill: float) -> Tensor:
        """Values of all completions, end to end -> [B, T, ...] or [1, N, ...], `fill` of tokens without log-probs."""
        given = torch.tensor(values)  # a copy: arrays of another process may be read-only
        result = torch.full((*self.shape, *given.shape[1:]), fill, dtype=given.dtype)
        sizes = [len(row.completion) for row in self.rows]
        for row, part in zip(self.rows, given.split(sizes), strict=True):
            result[row.own] = part
        result[~self._scored] = fill
        return result

    def pieces(self, width: int) -> Iterator[tuple[slice, slice]]:
        """Yield (rows, their tokens among all completions), few enough for calls with `width` log-probs a token."""
        start = begin = end = 0
        for number, row in enumerate(self.rows):
            size = len(row.completion)
            if number > start and (end + size - begin) * width > _VALUES:
                yield slice(start, number), slice(begin, end)
                start, begin = number, end
            end += size
        if self.rows:
            yield slice(start, len(self.rows)), slice(begin, end)


def as_candidate_tensor(given: Any, batch: TensorDictBase, vocab_size: int) -> Tensor:
    """Check candidates [B, T, K], or [1, N, K] of a packed batch, and return them as int64.

    Ids of tokens without log-probs are not read, and become 0. Raises `RequestError` for other shapes, and for ids
    outside the vocabulary.
    """
    shape = list(batch["tokens", "full"].shape)
    candidates = torch.as_tensor(given) if isinstance(given, Tensor | np.ndarray) else None
    is_integral = candidates is not None and not (candidates.is_floating_point() or candidates.dtype == torch.bool)
    if candidates is None or not is_integral or candidates.dim() != 3 or list(candidates.shape[:2]) != shape:
        shown = type(given).__name__ if candidates is None else f"{candidates.dtype} {list(candidates.shape)}"
        bound = f"a tensor of integers {[*shape, 'K']}, K tokens for each of ('tokens', 'full')"
        raise RequestError.for_field("candidate_ids", shown, bound)
    scored = scored_mask(batch)[..., None]
    wrong = ((candidates < 0) | (candidates >= vocab_size)) & scored
    if wrong.any():
        row, column, number = wrong.nonzero()[0].tolist()
        field = f"candidate_ids[{row}, {column}, {number}]"
        raise RequestError.for_field(field, int(candidates[row, column, number]), f"in [0, {vocab_size})")
    return candidates.long().masked_fill(~scored, 0)
