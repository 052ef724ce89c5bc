"""What the device keeps of the sequences that the runner knows, a row each: block tables and the token drawn last.

A step brings only what is new. The host has the same tables, to say where tokens go.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.messages import ScheduledSequence
from rollout_engine.model.device.upload import upload

_ROWS = 64
_TOKENS = 1 << 16
"""Rows whose last tokens never move: graphs know their address."""


class TableChanges(NamedTuple):
    """New entries of the flattened tables."""

    places: np.ndarray
    """int64 [n]."""
    blocks: np.ndarray
    """int32 [n]."""


class SequenceRows:
    """Rows by sequence id."""

    def __init__(self, max_blocks: int, device: torch.device) -> None:
        """`max_blocks`: of one sequence."""
        self.host_tables = np.zeros((_ROWS, max_blocks), np.int32)
        self.tables = torch.zeros(_ROWS, max_blocks, dtype=torch.int32, device=device)
        """int32 [rows, max_blocks]; what lies beyond a sequence's own blocks means nothing."""
        self.last_tokens = torch.zeros(_TOKENS, dtype=torch.int64, device=device)
        """int64, of each row."""
        self._row_of: dict[int, int] = {}
        self._num_blocks: dict[int, int] = {}
        self._free = list(range(_ROWS))[::-1]

    def add(self, sequence_ids: Iterable[int]) -> None:
        """Give each a row, and a known one its row anew."""
        for sequence_id in sequence_ids:
            self.forget(sequence_id)
            if not self._free:
                self._grow()
            self._row_of[sequence_id], self._num_blocks[sequence_id] = self._free.pop(), 0

    def forget(self, sequence_id: int) -> None:
        """Its row is free for another. An unknown id is a no-op."""
        row = self._row_of.pop(sequence_id, None)
        if row is not None:
            self._free.append(row)
            del self._num_blocks[sequence_id]

    def learn(self, scheduled: Iterable[ScheduledSequence]) -> TableChanges:
        """Note new entries on the host; returns them for `write`."""
        width = self.host_tables.shape[1]
        places, blocks = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        for sequence in scheduled:
            if sequence.block_ids:
                row, start = self._row_of[sequence.sequence_id], sequence.first_block
                end = start + len(sequence.block_ids)
                self.host_tables[row, start:end] = sequence.block_ids
                self._num_blocks[sequence.sequence_id] = end
                places.append(np.arange(row * width + start, row * width + end))
                blocks.append(np.array(sequence.block_ids, np.int32))
        return TableChanges(np.concatenate(places), np.concatenate(blocks))

    def write(self, places: Tensor, blocks: Tensor) -> None:
        """Note new entries on the device: int64 [n], int32 [n]."""
        if len(places):
            self.tables.view(-1)[places] = blocks

    def note(self, changes: TableChanges) -> None:
        """The same, by an upload of their own."""
        self.write(*upload(changes, self.tables.device))

    def rows(self, sequence_ids: Sequence[int]) -> np.ndarray:
        """int64, in order."""
        return np.array([self._row_of[sequence_id] for sequence_id in sequence_ids], np.int64)

    def block_tables(self) -> dict[int, list[int]]:
        """Every sequence's own blocks, by its id."""
        return {name: self.host_tables[row, : self._num_blocks[name]].tolist() for name, row in self._row_of.items()}

    def _grow(self) -> None:
        count = len(self.host_tables)
        self.host_tables = np.pad(self.host_tables, ((0, count), (0, 0)))
        self.tables = torch.cat([self.tables, torch.zeros_like(self.tables)])
        if len(self.last_tokens) < 2 * count:
            self.last_tokens = torch.cat([self.last_tokens, torch.zeros_like(self.last_tokens)])
        self._free = list(range(count, 2 * count))[::-1]
