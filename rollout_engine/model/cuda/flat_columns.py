"""The flat batch of a step as columns on the host."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rollout_engine.base.messages import NewSequence, ScheduledSequence

UNKNOWN = -1
"""Stands for a sequence's last token while only the device has it."""


class FlatColumns(NamedTuple):
    """N chunks and their T tokens, end to end."""

    token_ids: np.ndarray
    """int64 [T], drafted tokens among them; `UNKNOWN` for those that only the device has."""
    positions: np.ndarray
    """int64 [T], position of each token in its sequence."""
    slots: np.ndarray
    """int64 [T], KV slot of each token."""
    token_rows: np.ndarray
    """int64 [T], row of each token's sequence."""
    token_starts: np.ndarray
    """int32 [N + 1]."""
    context_lens: np.ndarray
    """int32 [N], tokens of each sequence, including these."""
    rows: np.ndarray
    """int64 [N], row of each sequence."""
    num_decodes: int
    """The first `num_decodes` sequences have one token each."""

    @classmethod
    def of(
        cls,
        scheduled: Sequence[ScheduledSequence],
        sequences: dict[int, NewSequence],
        rows: np.ndarray,
        tables: np.ndarray,
        block_size: int,
    ) -> "FlatColumns":
        """`scheduled` in the order of `decodes_first`; `rows` are their rows in `tables` int32 [rows, max_blocks]."""
        first = np.array([chunk.num_computed_tokens for chunk in scheduled], np.int64)
        sizes = np.array([chunk.num_scheduled_tokens for chunk in scheduled], np.int64)
        starts = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=starts[1:])
        token_ids: list[int] = []
        for chunk in scheduled:
            known = sequences[chunk.sequence_id].token_ids
            start, draft = chunk.num_computed_tokens, chunk.draft_token_ids
            end = start + chunk.num_scheduled_tokens - len(draft)
            token_ids += known[start:end]
            token_ids += [UNKNOWN] * (end - max(start, len(known)))
            token_ids += draft
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
    """Indices of `scheduled`: sequences with one token first, then the others, each in order."""
    indices = range(len(scheduled))
    return sorted(indices, key=lambda index: scheduled[index].num_scheduled_tokens > 1)
