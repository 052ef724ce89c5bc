"""From the scheduled sequences of a step to the columns of its flat batch, on the host."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rollout_engine.messages import NewSequence, ScheduledSequence

UNKNOWN = -1
"""A token that was drawn but has not come to the host: the last of its sequence."""


class FlatColumns(NamedTuple):
    """N chunks and their T tokens, end to end."""

    token_ids: np.ndarray
    """int64 [T]; `UNKNOWN` where the device knows."""
    positions: np.ndarray
    """int64 [T], of each token in its sequence."""
    slots: np.ndarray
    """int64 [T], where its KV goes."""
    token_rows: np.ndarray
    """int64 [T], row of its sequence."""
    token_starts: np.ndarray
    """int32 [N + 1]."""
    context_lens: np.ndarray
    """int32 [N], these tokens counted."""
    rows: np.ndarray
    """int64 [N], row of each sequence."""
    num_decodes: int
    """The first so many have one token."""

    @classmethod
    def of(
        cls,
        scheduled: Sequence[ScheduledSequence],
        sequences: dict[int, NewSequence],
        rows: np.ndarray,
        tables: np.ndarray,
        block_size: int,
    ) -> "FlatColumns":
        """`scheduled` as `decodes_first` gives it; `rows` are theirs in the block tables int32 [rows, max_blocks]."""
        first = np.array([chunk.num_computed_tokens for chunk in scheduled], np.int64)
        sizes = np.array([chunk.num_tokens for chunk in scheduled], np.int64)
        starts = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=starts[1:])
        token_ids: list[int] = []
        for chunk in scheduled:
            known = sequences[chunk.sequence_id].token_ids
            start, end = chunk.num_computed_tokens, chunk.num_computed_tokens + chunk.num_tokens
            token_ids += known[start:end]
            token_ids += [UNKNOWN] * (end - max(start, len(known)))
        positions = np.arange(starts[-1]) + np.repeat(first - starts[:-1], sizes)
        token_rows = np.repeat(rows, sizes)
        slots = tables[token_rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
        return cls(
            token_ids=np.array(token_ids, np.int64),
            positions=positions,
            slots=slots,
            token_rows=token_rows,
            token_starts=starts.astype(np.int32),
            context_lens=(first + sizes).astype(np.int32),
            rows=rows,
            num_decodes=int((sizes == 1).sum()),
        )


def decodes_first(scheduled: Sequence[ScheduledSequence]) -> list[int]:
    """Indices of `scheduled`: those with one token, then the others, each in order."""
    indices = range(len(scheduled))
    return sorted(indices, key=lambda index: scheduled[index].num_tokens > 1)
