"""Inputs of steps in which every sequence decodes, where graphs read them: one upload and one launch a step."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.kernels.triton.inputs import prepare
from rollout_engine.kernels.triton.paged_attention import Batch, Prefixes
from rollout_engine.kernels.triton.shared_prefix import SharedPrefixes
from rollout_engine.kernels.triton.work import COLUMNS
from rollout_engine.model.device.draws import DrawColumns
from rollout_engine.model.device.layout import FlatColumns
from rollout_engine.model.device.pool import DeviceBatch
from rollout_engine.model.device.sequences import SequenceRows, TableChanges
from rollout_engine.model.device.upload import StaticColumns

_BATCH = {"token_ids": (torch.int64, 0), "positions": (torch.int64, 0), "slots": (torch.int64, -1)}
_BATCH |= {"rows": (torch.int64, 0), "context_lens": (torch.int32, 0), "units": (torch.int32, 0)}
_DRAWS = {"temperatures": (torch.float32, 1), "seeds": (torch.int64, 0), "positions": (torch.int64, 0)}
_DRAWS |= {"choices": (torch.int32, 0), "top_k": (torch.int64, 0), "top_p": (torch.float64, 1)}
_DRAWS |= {"min_p": (torch.float64, 0), "truncates": (torch.bool, 0), "places": (torch.int64, -1)}
"""Dtypes, and what pads a batch: no context, no KV written, no token told."""
assert tuple(_DRAWS) == DrawColumns._fields
_BLOCKS_AT_ONCE = 2
"""New blocks per sequence that travel with the step; seldom is there more than one."""


class DecodeStep(NamedTuple):
    """On the host."""

    flat: FlatColumns
    draws: DrawColumns[np.ndarray] | None
    """Of the same rows; None where others are drawn."""
    prefixes: SharedPrefixes | None
    changes: TableChanges


class DecodeInputs:
    """Static memory."""

    def __init__(self, max_batch: int, block_size: int, rows: SequenceRows) -> None:
        device, max_blocks = rows.tables.device, rows.tables.shape[1]
        self._rows, self._block_size, self._max_changes = rows, block_size, _BLOCKS_AT_ONCE * max_batch
        sizes = [(dtype, max_batch) for dtype, _ in (*_BATCH.values(), *_DRAWS.values())]
        sizes += [(torch.int32, max_batch * COLUMNS), (torch.int32, 1)]
        sizes += [(torch.int64, self._max_changes), (torch.int32, self._max_changes)]
        self._static = StaticColumns(sizes, device)
        self._starts = torch.arange(max_batch + 1, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_batch, max_blocks, dtype=torch.int32, device=device)

    def clear(self) -> None:
        """As padding alone."""
        self._send({}, {}, len(self._tables))

    def put(self, step: DecodeStep, size: int) -> None:
        """The inputs of `step`, padded to `size` sequences."""
        flat, changes = step.flat, step.changes
        if len(changes.places) > self._max_changes:
            self._rows.note(changes)
            changes = TableChanges(changes.places[:0], changes.blocks[:0])
        batch = {name: getattr(flat, name) for name in _BATCH if name != "units"}
        draws = {} if step.draws is None else step.draws._asdict()
        self._send(batch, draws, size, step.prefixes, changes)
        token_ids, _, _, rows, context_lens, *_ = (column[: len(flat.rows)] for column in self._static.columns)
        places, blocks = self._static.columns[-2:]
        prepare(
            *(token_ids, rows, context_lens, (places, blocks, len(changes.places))),
            *(self._rows.last_tokens, self._rows.tables, self._tables, self._block_size),
        )

    def batch(self, size: int, *, has_prefixes: bool) -> DeviceBatch:
        """Of `size` sequences."""
        token_ids, positions, slots, _, lens, units = (column[:size] for column in self._static.columns[: len(_BATCH)])
        prefixes = None
        if has_prefixes:
            items, num_items = self._static.columns[-4:-2]
            prefixes = Prefixes(items.view(-1, COLUMNS), units, num_items)
        attention = Batch(self._starts[: size + 1], lens, self._tables[:size], size, prefixes)
        return DeviceBatch(token_ids, positions, slots, attention)

    def draws(self, size: int) -> DrawColumns[Tensor]:
        """Of `size` sequences."""
        columns = self._static.columns[len(_BATCH) : len(_BATCH) + len(_DRAWS)]
        return DrawColumns(*(column[:size] for column in columns))

    def _send(
        self,
        batch: dict[str, np.ndarray],
        draws: dict[str, np.ndarray],
        size: int,
        prefixes: SharedPrefixes | None = None,
        changes: TableChanges | None = None,
    ) -> None:
        none = np.empty(0, np.int32)
        if prefixes is not None:
            batch = batch | {"units": prefixes.units}
        columns = [
            (values.get(name, none), size, padding)
            for values, kinds in ((batch, _BATCH), (draws, _DRAWS))
            for name, (_, padding) in kinds.items()
        ]
        items = none if prefixes is None else prefixes.items.reshape(-1)
        columns += [(items, 0, 0), (np.array([len(items) // COLUMNS], np.int32), 1, 0)]
        columns += [(column, 0, 0) for column in (changes or (none, none))]
        self._static.send(columns)
