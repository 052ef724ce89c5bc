"""The adapters of a model on the CPU, added to its row-invariant linears, and to projections of latents.

Linears of a vision tower are among them. A picture is encoded under the adapter of its sequence (`encoding`), before
the rows of text are computed under those of theirs (`active`).
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollout_engine.kernels.adapters import AdapterPair, AdapterRows, AdapterTable, add_adapters
from rollout_engine.kernels.cpu.adapters import BLOCK_ROWS
from rollout_engine.kernels.latent import LatentAdapter
from rollout_engine.model.adapters.peft_format import LinearAdapter
from rollout_engine.model.adapters.pool import AdapterPool, Pairs, Target
from rollout_engine.model.modules.composites import PICTURES
from rollout_engine.model.modules.latent_attention import LatentProjection
from rollout_engine.model.modules.own_forwards import linears_read_by_routers
from rollout_engine.model.packing.linear_groups import LinearGroup, RowInvariantLinear
from rollout_engine.model.ranks.cut import inputs_of, outputs_of


class CpuAdapterPool(AdapterPool):
    """Adds adapters to products of `LinearGroup`s inside `active`; the compiled decoder reads their tables.

    Satisfies `pictures.encoder.TowerAdapters`.
    """

    block_rows = BLOCK_ROWS

    def __init__(self, module: nn.Module, **sizes: Any) -> None:
        super().__init__(module, **sizes)
        self._of_number: dict[int, LinearGroup | LatentProjection] = {}
        self.active_rows: AdapterRows | None = None
        """Rows of the batch that is computed now, inside `active`."""
        self._encoding_slot: int | None = None
        """Slot of the adapter that a picture is encoded under, -1 for none, inside `encoding`; None outside."""
        self._tower_groups: set[int] = set()
        """Numbers of the groups of linears that are of a vision tower or its projector."""
        self._tower_versions: dict[int, int] = {}
        """By slot, of adapters that change the tower."""

    def table_of(self, group: LinearGroup) -> AdapterTable | None:
        """The adapters of a group of linears, until an adapter is installed or removed; None: none changes it."""
        return self._tables.get(id(group))

    @contextmanager
    def active(self, rows: AdapterRows | None) -> Iterator[None]:
        """Inside, products of the module's linears get the adapters of `rows`."""
        self.active_rows = rows
        try:
            yield
        finally:
            self.active_rows = None

    @contextmanager
    def encoding(self, slot: int) -> Iterator[None]:
        self._encoding_slot = slot
        try:
            yield
        finally:
            self._encoding_slot = None

    def tower_version(self, slot: int) -> int:
        return self._tower_versions.get(slot, 0)

    def put(self, slot: int, pairs: Pairs) -> None:
        super().put(slot, pairs)
        if not self._tower_groups.isdisjoint(pairs):
            self._tower_versions[slot] = self.num_changes

    def _clear(self, slot: int, keep: Collection[int]) -> None:
        super()._clear(slot, keep)
        self._tower_versions.pop(slot, None)

    def _find_targets(self) -> dict[str, Target]:
        head = self._module.get_output_embeddings()  # type: ignore[operator]
        others = {id(head), *map(id, linears_read_by_routers(self._module))}  # a LoRA of these changes nothing in peft
        found = {}
        for name, child in self._module.named_modules():
            if isinstance(child, RowInvariantLinear) and id(child) not in others:
                found[name] = Target(id(child._group), child._slot, child, inputs_of(child), outputs_of(child))
                self._of_number[id(child._group)] = child._group
                if name.startswith(f"{PICTURES}."):
                    self._tower_groups.add(id(child._group))
            elif isinstance(child, LatentProjection):
                found[name] = Target(id(child), 0, child, inputs_of(child), outputs_of(child))
                self._of_number[id(child)] = child
        return found

    def _pack_linear(self, linear: LinearAdapter) -> AdapterPair:
        return AdapterPair.packed(linear.a, linear.b, linear.scale, self.dtype)

    def _made_table(self, group: int) -> "AdapterTable | LatentAdapterTable":
        owner, linears = self._of_number[group], self._groups[group]
        if isinstance(owner, LatentProjection):
            latents = LatentAdapterTable(self._max_loras, owner)
            owner.find_adapters = lambda: latents.adapters_of(self.active_rows)
            return latents
        sizes = [child.out_features for child in linears]
        table = AdapterTable(self._max_loras, linears[0].in_features, sizes, self.dtype)
        owner.add_to = partial(self._add, table)
        return table

    def _dropped_table(self, group: int) -> None:
        owner = self._of_number[group]
        if isinstance(owner, LatentProjection):
            owner.find_adapters = None
        else:
            owner.add_to = None

    def _add(self, table: AdapterTable, x: Tensor, out: Tensor) -> None:
        slot = self._encoding_slot
        rows = self.active_rows if slot is None else AdapterRows.of([slot], [len(x)])
        if rows is not None:
            add_adapters(table, x, out, rows)


class LatentAdapterTable:
    """The adapters of all slots for one projection of latents. Satisfies `adapters.pool.Table`."""

    def __init__(self, num_slots: int, projection: LatentProjection) -> None:
        self.sizes = [projection.out_features]
        self._projection = projection
        self._adapters: list[LatentAdapter | None] = [None] * num_slots

    def set(self, slot: int, pairs: Sequence[AdapterPair | None]) -> None:
        [pair] = pairs
        self._adapters[slot] = None
        if pair is not None:
            a, b = (matrix.t().contiguous() for matrix in pair.matrices(self.sizes[0]))
            self._adapters[slot] = LatentAdapter(a, self._projection.by_head(b), pair.scale)

    def adapters_of(self, rows: AdapterRows | None) -> list[LatentAdapter]:
        """The adapters of some rows of a batch, each with its own."""
        if rows is None:
            return []
        of_slots = ((each, np.flatnonzero(rows.slots == slot)) for slot, each in enumerate(self._adapters))
        return [
            each._replace(rows=torch.from_numpy(rows.rows[places].astype(np.int64)))
            for each, places in of_slots
            if each is not None and len(places)
        ]
