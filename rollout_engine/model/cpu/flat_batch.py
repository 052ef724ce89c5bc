"""The flat batch of one step: chunks of sequences, end to end."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rollout_engine.kernels.attention_params import Reach
from rollout_engine.kernels.cpu.attention import Chunk, ChunkColumns
from rollout_engine.kernels.state_chunks import StateChunks


class SequenceChunk(NamedTuple):
    """Tokens [num_computed_tokens, num_computed_tokens + len(token_ids)) of one sequence, computed in one step."""

    token_ids: Sequence[int]
    num_computed_tokens: int
    block_ids: list[int]
    """The sequence's block table, from position 0 to the end of the chunk."""
    state_slot: int = -1
    """The slot of its states, written behind the chunk, and read if it does not begin at 0; -1: it keeps none."""


class FlatBatch(NamedTuple):
    """All chunks of a step, end to end."""

    token_ids: np.ndarray
    """int64 [T]."""
    columns: ChunkColumns
    """Columns of N chunks."""
    shifts: np.ndarray | None = None
    """int64 [N], added to the positions of each chunk's tokens: how trials reach far positions with short contexts."""
    states: StateChunks | None = None
    """The slots of states that chunks read and write; None: no layer keeps any."""
    reach: Reach | None = None
    """How far the T tokens see past their own position; None: no farther."""

    @classmethod
    def of(cls, chunks: Iterable[SequenceChunk], shifts: Sequence[int] | None = None) -> "FlatBatch":
        """The flat batch of `chunks`, in order; `shifts` as the field."""
        chunks = list(chunks)
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        work = (Chunk(c.num_computed_tokens, len(c.token_ids), c.block_ids) for c in chunks)
        columns, states = ChunkColumns.of(work), None
        if any(chunk.state_slot >= 0 for chunk in chunks):
            sizes, slots = [len(c.token_ids) for c in chunks], [c.state_slot for c in chunks]
            states = StateChunks.in_place(sizes, columns.first_positions, slots)
        return cls(np.array(token_ids, np.int64), columns, None if shifts is None else np.array(shifts), states)

    @property
    def positions(self) -> np.ndarray:
        """int64 [T], position of each token in its sequence."""
        first, starts = self.columns.first_positions, self.columns.token_starts
        if self.shifts is not None:
            first = first + self.shifts
        if len(first) == len(self.token_ids):
            return first
        positions: np.ndarray = np.arange(len(self.token_ids)) + np.repeat(first - starts[:-1], np.diff(starts))
        return positions

    def chunks(self, block_size: int) -> list[SequenceChunk]:
        """The chunks one by one."""
        columns, blocks = self.columns, self.columns.blocks.reshape(-1)
        made = []
        for row, first in enumerate(columns.first_positions.tolist()):
            start, end = columns.token_starts[row : row + 2].tolist()
            table = columns.block_starts[row] + np.arange(-(-(first + end - start) // block_size))
            made.append(SequenceChunk(self.token_ids[start:end].tolist(), first, blocks[table].tolist()))
        return made
