"""The block tables of all sequences that the runner knows, as rows of one matrix."""

import numpy as np

from rollout_engine.messages import ScheduledSequence


class BlockRows:
    """A step brings only what is new of a table; kernels read the rows in place."""

    def __init__(self) -> None:
        self.matrix = np.zeros((64, 64), np.int32)
        """[rows, blocks]; what lies beyond a sequence's own blocks means nothing."""
        self._row_of: dict[int, int] = {}
        self._num_blocks: dict[int, int] = {}
        self._free = list(range(64))[::-1]

    def learn(self, scheduled: list[ScheduledSequence]) -> None:
        """Write the new entries."""
        for sequence in scheduled:
            if sequence.block_ids:
                row, start = self._row(sequence.sequence_id), sequence.first_block
                end = start + len(sequence.block_ids)
                if end > self.matrix.shape[1]:
                    self.matrix = np.pad(self.matrix, ((0, 0), (0, end)))
                self.matrix[row, start:end] = sequence.block_ids
                self._num_blocks[sequence.sequence_id] = end

    def forget(self, sequence_id: int) -> None:
        """Its row is free for another. An unknown id is a no-op."""
        row = self._row_of.pop(sequence_id, None)
        if row is not None:
            self._free.append(row)
            self._num_blocks.pop(sequence_id, None)

    def tables(self) -> dict[int, list[int]]:
        """Every sequence's own blocks, by its id."""
        return {name: self.matrix[row, : self._num_blocks.get(name, 0)].tolist() for name, row in self._row_of.items()}

    def starts(self, scheduled: list[ScheduledSequence]) -> np.ndarray:
        """Where in the flattened `matrix` each table begins, int64 [len(scheduled)]."""
        rows = [self._row_of[sequence.sequence_id] for sequence in scheduled]
        return np.array(rows, np.int64) * self.matrix.shape[1]

    def _row(self, sequence_id: int) -> int:
        row = self._row_of.get(sequence_id)
        if row is None:
            if not self._free:
                count = len(self.matrix)
                self.matrix = np.pad(self.matrix, ((0, count), (0, 0)))
                self._free = list(range(count, 2 * count))[::-1]
            row = self._row_of[sequence_id] = self._free.pop()
        return row
