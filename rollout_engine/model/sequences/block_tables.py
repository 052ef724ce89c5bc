"""The block tables of all sequences a runner has, as rows of one matrix. A step brings only new entries."""

from collections.abc import Iterable, Sequence

import numpy as np

from rollout_engine.base.messages import ScheduledSequence


class BlockTableMatrix:
    """One row per sequence, by sequence id; kernels read the rows in place."""

    def __init__(self, max_blocks: int = 64, *, num_rows: int = 64) -> None:
        """Both grow as needed."""
        self.matrix = np.zeros((num_rows, max_blocks), np.int32)
        """int32 [rows, blocks]; entries past the end of a sequence's table are undefined."""
        self._row_of: dict[int, int] = {}
        self._num_blocks: dict[int, int] = {}
        self._free = list(range(num_rows))[::-1]

    def add(self, sequence_ids: Iterable[int]) -> None:
        """Give each sequence a row; a known one gets an empty table."""
        for sequence_id in sequence_ids:
            self.forget(sequence_id)
            if not self._free:
                self._grow()
            self._row_of[sequence_id], self._num_blocks[sequence_id] = self._free.pop(), 0

    def forget(self, sequence_id: int) -> None:
        """Free the row of a sequence. An unknown id is a no-op."""
        row = self._row_of.pop(sequence_id, None)
        if row is not None:
            self._free.append(row)
            del self._num_blocks[sequence_id]

    def extend(self, scheduled: Iterable[ScheduledSequence]) -> list[tuple[int, int, list[int]]]:
        """Write the new entries; returns the row, the first column and the block ids of each run of them."""
        written = []
        for sequence in scheduled:
            if sequence.block_ids:
                row, start = self._row_of[sequence.sequence_id], sequence.first_block
                end = start + len(sequence.block_ids)
                if end > self.matrix.shape[1]:
                    self.matrix = np.pad(self.matrix, ((0, 0), (0, end)))
                self.matrix[row, start:end] = sequence.block_ids
                self._num_blocks[sequence.sequence_id] = end
                written.append((row, start, sequence.block_ids))
        return written

    def rows(self, sequence_ids: Sequence[int]) -> np.ndarray:
        """The row of each sequence, int64 [len(sequence_ids)]."""
        return np.array([self._row_of[sequence_id] for sequence_id in sequence_ids], np.int64)

    def tables(self) -> dict[int, list[int]]:
        """The block ids of every sequence, by its id."""
        return {name: self.matrix[row, : self._num_blocks[name]].tolist() for name, row in self._row_of.items()}

    def _grow(self) -> None:
        count = len(self.matrix)
        self.matrix = np.pad(self.matrix, ((0, count), (0, 0)))
        self._free = list(range(count, 2 * count))[::-1]
