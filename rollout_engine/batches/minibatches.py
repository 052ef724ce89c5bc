"""Minibatches of a rollout, in either layout."""

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rollout_engine.base.errors import RequestError
from rollout_engine.batches.layout import check_batch, is_packed, leaves, num_sequences, packed_span, places
from rollout_engine.batches.summary import RolloutBatch, with_note


def minibatches(
    batch: TensorDictBase,
    size: int,
    *,
    shuffle: bool = False,
    generator: torch.Generator | None = None,
    keep_groups: bool = False,
) -> Iterator[RolloutBatch]:
    """Split a rollout into batches of `size` sequences, with its layout and all its keys; the last may be smaller.

    Args:
        batch: a rollout; keys that you added, advantages for example, are split too.
        size: sequences per minibatch.
        shuffle: use a random order, by `torch.randperm`, instead of the batch's.
        generator: for that order; giving it implies `shuffle`.
        keep_groups: never split a group: a minibatch takes whole groups as long as they fit, in the order of groups.
            Raises `RequestError` if `size` is smaller than a group.

    Padded minibatches are as wide as the batch. Together they hold every sequence exactly once.
    """
    check_batch(batch)
    if type(size) is not int or size < 1:
        raise RequestError.for_field("size", size, "an int of at least 1")
    groups = _groups(batch) if keep_groups else [[row] for row in range(num_sequences(batch))]
    largest = max(map(len, groups), default=0)
    if largest > size:
        bound = f"at least {largest}, the sequences of the largest group, with keep_groups=True"
        raise RequestError.for_field("size", size, bound)
    if shuffle or generator is not None:
        groups = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
    return (_sequences(batch, torch.tensor(rows)) for rows in _fill_minibatches(groups, size))


def _groups(batch: TensorDictBase) -> list[list[int]]:
    """The rows of each group, in order of appearance."""
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(batch["group_id"].tolist()):
        groups.setdefault(group, []).append(row)
    return list(groups.values())


def _fill_minibatches(groups: list[list[int]], size: int) -> Iterator[list[int]]:
    rows: list[int] = []
    for group in groups:
        if len(rows) + len(group) > size:
            yield rows
            rows = []
        rows = rows + group
    if rows:
        yield rows


def _sequences(batch: TensorDictBase, rows: Tensor) -> Any:
    """The sequences with these row numbers, in this order."""
    if not is_packed(batch):
        return batch[rows]
    where, chosen = places(batch), rows.tolist()
    columns = {
        span: torch.cat([torch.arange(part.start, part.stop) for _, part in (spans[row] for row in chosen)])
        for span, spans in where._asdict().items()
    }
    part = RolloutBatch({}, batch_size=[], device=batch.device)
    for key, value in leaves(batch):
        if key != "cu_seqlens":
            span = packed_span(key, value, batch)
            part[key] = value[rows] if span is None else value[:, columns[span]]
    ends = torch.tensor([0, *(where.full[row][1].stop - where.full[row][1].start for row in chosen)]).cumsum(0)
    part["cu_seqlens"] = ends.to(batch["cu_seqlens"])
    return with_note(part, [batch])
