"""Inputs of decode-only steps in static memory that graphs read: one upload and one launch per step."""

from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.kernels.adapters import AdapterRows
from rollout_engine.kernels.state_chunks import ChunkTensors, StateChunks
from rollout_engine.kernels.triton.adapters import AdapterBatch
from rollout_engine.kernels.triton.decode_inputs import prepare
from rollout_engine.kernels.triton.paged_attention import Batch, Prefixes
from rollout_engine.kernels.triton.shared_prefix import SharedPrefixes
from rollout_engine.kernels.triton.work import COLUMNS
from rollout_engine.model.cuda.attention import CudaBatch
from rollout_engine.model.cuda.draws import DrawColumns, padding_row
from rollout_engine.model.cuda.flat_columns import FlatColumns
from rollout_engine.model.cuda.sequence_rows import SequenceRows, TableChanges
from rollout_engine.model.cuda.upload import StaticColumns

_BATCH = {"token_ids": (torch.int64, 0), "positions": (torch.int64, 0), "slots": (torch.int64, -1)}
_BATCH |= {"rows": (torch.int64, 0), "context_lens": (torch.int32, 0), "units": (torch.int32, 0)}
_STATES = {"sources": (torch.int64, -1), "write_slots": (torch.int64, -1)}
"""Columns of slots of states: a padded row begins with zeros, and writes none."""
_DRAWS = [(torch.from_numpy(column).dtype, column.item()) for column in padding_row().flat]
"""Dtype and padding value of each column. A padded row has no context, writes no KV and returns no token."""
_BLOCK_FIELDS = 3
"""Numbers of a block of rows with one adapter."""
_BLOCKS_AT_ONCE = 2
"""New blocks per sequence that fit a step's upload; there is seldom more than one."""


class DecodeStep(NamedTuple):
    """One decode-only step on the host."""

    flat: FlatColumns
    draws: DrawColumns[np.ndarray] | None
    """Draws from the same rows; None if other rows are drawn from."""
    prefixes: SharedPrefixes | None
    changes: TableChanges
    adapters: AdapterRows | None = None
    states: StateChunks | None = None
    """One write for each sequence; None: no layer keeps states."""


class DecodeInputs:
    """Static memory for a batch and its draws."""

    def __init__(self, max_batch: int, block_size: int, rows: SequenceRows, *, has_states: bool = False) -> None:
        """`has_states`: sequences have slots of states."""
        self._columns = _BATCH | (_STATES if has_states else {})
        device, max_blocks = rows.tables_on_device.device, rows.matrix.shape[1]
        self._rows, self._block_size, self._max_changes = rows, block_size, _BLOCKS_AT_ONCE * max_batch
        sizes = [(dtype, max_batch) for dtype, _ in (*self._columns.values(), *_DRAWS)]
        sizes += [(torch.int32, max_batch), (torch.int32, max_batch * _BLOCK_FIELDS)]
        sizes += [(torch.int32, max_batch * COLUMNS), (torch.int32, 1)]
        sizes += [(torch.int64, self._max_changes), (torch.int32, self._max_changes)]
        self._static = StaticColumns(sizes, device)
        self._starts = torch.arange(max_batch + 1, dtype=torch.int32, device=device)
        self._bounds = torch.arange(max_batch + 1, device=device)
        self._ends = torch.arange(1, max_batch + 1, device=device)
        self._tables = torch.zeros(max_batch, max_blocks, dtype=torch.int32, device=device)

    def clear(self) -> None:
        """Fill everything with padding."""
        self._send({}, [], len(self._tables))

    def put(self, step: DecodeStep, size: int) -> None:
        """Upload the inputs of `step`, padded to `size` sequences."""
        flat, changes = step.flat, step.changes
        if len(changes.places) > self._max_changes:
            self._rows.upload(changes)
            changes = TableChanges(changes.places[:0], changes.blocks[:0])
        batch = {name: getattr(flat, name) for name in _BATCH if name != "units"}
        if step.states is not None:
            batch |= {name: getattr(step.states, name) for name in _STATES}
        draws = [] if step.draws is None else step.draws.flat
        self._send(batch, draws, size, step._replace(changes=changes))
        token_ids, _, _, rows, context_lens, *_ = (column[: len(flat.rows)] for column in self._static.columns)
        places, blocks = self._static.columns[-2:]
        prepare(
            *(token_ids, rows, context_lens, (places, blocks, len(changes.places))),
            *(self._rows.last_tokens, self._rows.tables_on_device, self._tables, self._block_size),
        )

    def memory(self, size: int) -> list[Tensor]:
        """All that graphs of `size` sequences read of a batch and its draws, contiguous."""
        return [self._static.memory, self._tables[:size]]

    def batch(self, size: int, *, has_prefixes: bool, has_adapters: bool = False) -> CudaBatch:
        """The static batch of `size` sequences."""
        own = [column[:size] for column in self._static.columns[: len(self._columns)]]
        token_ids, positions, slots, _, lens, units, *of_states = own
        prefixes = None
        if has_prefixes:
            items, num_items = self._static.columns[-4:-2]
            prefixes = Prefixes(items.view(-1, COLUMNS), units, num_items)
        adapters = None
        if has_adapters:
            adapter_rows, adapter_blocks = self._static.columns[-6:-4]
            adapters = AdapterBatch(adapter_rows[:size], adapter_blocks.view(-1, _BLOCK_FIELDS)[:size])
        attention = Batch(self._starts[: size + 1], lens, self._tables[:size], size, prefixes)
        states = self._chunks(size, *of_states) if of_states else None
        return CudaBatch(token_ids, positions, slots, attention, adapters, states=states)

    def _chunks(self, size: int, sources: Tensor, slots: Tensor) -> ChunkTensors:
        """Chunks of one token, each of which writes one slot."""
        bounds, ends = self._bounds[: size + 1], self._ends[:size]
        return ChunkTensors(bounds, sources, bounds, ends, slots, self._bounds[:size])

    def draws(self, size: int) -> DrawColumns[Tensor]:
        """The static draws of `size` sequences."""
        first = len(self._columns)
        columns = self._static.columns[first : first + len(_DRAWS)]
        return DrawColumns.of_flat(column[:size] for column in columns)

    def _send(
        self,
        batch: dict[str, np.ndarray],
        draws: list[np.ndarray],
        size: int,
        step: DecodeStep | None = None,
    ) -> None:
        none = np.empty(0, np.int32)
        prefixes, changes, plan = (None, None, None) if step is None else (step.prefixes, step.changes, step.adapters)
        if prefixes is not None:
            batch = batch | {"units": prefixes.units}
        columns = [(batch.get(name, none), size, padding) for name, (_, padding) in self._columns.items()]
        pairs = zip(draws or repeat(none), _DRAWS, strict=False)
        columns += [(column, size, padding) for column, (_, padding) in pairs]
        rows, blocks = (none, none) if plan is None else (plan.rows, plan.blocks.reshape(-1))
        columns += [(rows, size, 0), (blocks, size * _BLOCK_FIELDS, 0)]
        items = none if prefixes is None else prefixes.items.reshape(-1)
        columns += [(items, 0, 0), (np.array([len(items) // COLUMNS], np.int32), 1, 0)]
        columns += [(column, 0, 0) for column in (changes or (none, none))]
        self._static.send(columns)
