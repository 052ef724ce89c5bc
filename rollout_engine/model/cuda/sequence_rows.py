"""Block tables and last drawn tokens on the device, one row per sequence. The host keeps the same tables."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.messages import ScheduledSequence
from rollout_engine.model.cuda.upload import upload
from rollout_engine.model.sequences.block_tables import BlockTableMatrix

_TOKENS = 1 << 16
"""Rows up to which `last_tokens` keeps its address, which graphs hold."""


class TableChanges(NamedTuple):
    """New entries of the flattened tables."""

    places: np.ndarray
    """int64 [n]."""
    blocks: np.ndarray
    """int32 [n]."""


class SequenceRows(BlockTableMatrix):
    """`matrix` is the host's; `learn` and `write` keep the device's `tables` equal to it."""

    def __init__(self, max_blocks: int, device: torch.device) -> None:
        """`max_blocks`: the most blocks of one sequence."""
        super().__init__(max_blocks)
        self.tables_on_device = torch.zeros(self.matrix.shape, dtype=torch.int32, device=device)
        """int32 [rows, max_blocks]; entries past the end of a sequence's table are undefined."""
        self.last_tokens = torch.zeros(_TOKENS, dtype=torch.int64, device=device)
        """int64 [at least rows]: the token drawn last of each row."""

    def learn(self, scheduled: Iterable[ScheduledSequence]) -> TableChanges:
        """Write the new entries on the host; returns them for `write`."""
        width = self.matrix.shape[1]
        places, blocks = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        for row, start, block_ids in self.extend(scheduled):
            places.append(np.arange(row * width + start, row * width + start + len(block_ids)))
            blocks.append(np.array(block_ids, np.int32))
        return TableChanges(np.concatenate(places), np.concatenate(blocks))

    def write(self, places: Tensor, blocks: Tensor) -> None:
        """Write new entries on the device: int64 [n], int32 [n]."""
        if len(places):
            self.tables_on_device.view(-1)[places] = blocks

    def upload(self, changes: TableChanges) -> None:
        """Write new entries on the device by an upload of their own."""
        self.write(*upload(changes, self.tables_on_device.device))

    def _grow(self) -> None:
        count = len(self.matrix)
        super()._grow()
        self.tables_on_device = torch.cat([self.tables_on_device, torch.zeros_like(self.tables_on_device)])
        if len(self.last_tokens) < 2 * count:
            self.last_tokens = torch.cat([self.last_tokens, torch.zeros_like(self.last_tokens)])
