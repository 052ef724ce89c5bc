"""Which layers each stage of a pipe has: as equal costs as whole layers allow, if none holds too many bytes.

A layer costs its bytes, which a step reads; so does the head, on the last stage. The embedding costs nothing on the
first, since a step reads some rows of it, but its bytes are held there.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise

from rollout_engine.base.errors import ConfigError

_SLACK = 1.2
"""Bytes of a stage, as a multiple of an even part of all, up to which equal costs count more."""


def split_layers(
    layers: Sequence[int], *, embedding: int, head: int, num_stages: int, joined: Collection[int] = ()
) -> list[range]:
    """The layers of each stage, in order.

    Args:
        layers: bytes of each.
        embedding: bytes that the first stage holds in addition.
        head: bytes that the last one holds in addition.
        joined: numbers of layers that must be on the stage of the layer before.

    Raises `ConfigError` if there are too few layers to divide.
    """
    cuts = [index for index in range(1, len(layers)) if index not in joined]
    if len(cuts) < num_stages - 1:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} is too many: the model has {len(layers)} layers, which can be "
            f"divided at {len(cuts)} places. Give {len(cuts) + 1} at most."
        )
    held = [*layers]
    held[0] += embedding
    held[-1] += head
    least = _least_bound(held, cuts, num_stages)
    most = max(least, int(_SLACK * sum(held) / num_stages))
    costs = [*layers]
    costs[-1] += head
    return _best(costs, held, cuts, num_stages, most)


def _least_bound(weights: Sequence[int], cuts: Sequence[int], num_stages: int) -> int:
    """The largest sum of a stage, in the division in which that is smallest."""
    found = _best(weights, weights, cuts, num_stages, sum(weights))
    return max(sum(weights[index] for index in stage) for stage in found)


def _best(
    costs: Sequence[int], held: Sequence[int], cuts: Sequence[int], num_stages: int, most_held: int
) -> list[range]:
    """The division whose largest cost is smallest, of those in which no stage holds more than `most_held`."""
    edges = [0, *cuts, len(costs)]
    cost_before, held_before = _sums(costs), _sums(held)
    impossible = sum(costs) + 1
    best: list[list[tuple[int, int]]] = [[(0 if edge == 0 else impossible, -1) for edge in edges]]
    for _ in range(num_stages):
        row = []
        for stop_place, stop in enumerate(edges):
            choices = [
                (max(best[-1][place][0], cost_before[stop] - cost_before[start]), place)
                for place, start in enumerate(edges[:stop_place])
                if held_before[stop] - held_before[start] <= most_held
            ]
            row.append(min(choices, default=(impossible, -1)))
        best.append(row)
    place, ends = len(edges) - 1, [len(costs)]
    for row in reversed(best[1:]):
        place = row[place][1]
        ends.append(edges[place])
    return [range(start, stop) for start, stop in pairwise(reversed(ends))]


def _sums(values: Sequence[int]) -> list[int]:
    """Sums of the first 0, 1, ... values."""
    found = [0]
    for value in values:
        found.append(found[-1] + value)
    return found
