"""The adapters of a model on the CPU, added to its row-invariant linears."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from rollout_engine.kernels.adapters import AdapterPair, AdapterRows, AdapterTable, add_adapters
from rollout_engine.kernels.cpu.adapters import BLOCK_ROWS
from rollout_engine.model.adapters.peft_format import LinearAdapter
from rollout_engine.model.adapters.pool import AdapterPool, Target
from rollout_engine.model.packing.linear_groups import LinearGroup, RowInvariantLinear
from rollout_engine.model.ranks.cut import inputs_of, outputs_of


class CpuAdapterPool(AdapterPool):
    """Adds adapters to products of `LinearGroup`s inside `active`; the compiled decoder reads their tables."""

    block_rows = BLOCK_ROWS

    def __init__(self, module: nn.Module, **sizes: Any) -> None:
        super().__init__(module, **sizes)
        self._of_number: dict[int, LinearGroup] = {}
        self.active_rows: AdapterRows | None = None
        """Rows of the batch that is computed now, inside `active`."""

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

    def _find_targets(self) -> dict[str, Target]:
        head = self._module.get_output_embeddings()  # type: ignore[operator]
        found = {}
        for name, child in self._module.named_modules():
            if isinstance(child, RowInvariantLinear) and child is not head:
                found[name] = Target(id(child._group), child._slot, child, inputs_of(child), outputs_of(child))
                self._of_number[id(child._group)] = child._group
        return found

    def _pack_linear(self, linear: LinearAdapter) -> AdapterPair:
        return AdapterPair.packed(linear.a, linear.b, linear.scale, self.dtype)

    def _made_table(self, group: int) -> AdapterTable:
        linears = self._groups[group]
        sizes = [child.out_features for child in linears]
        table = AdapterTable(self._max_loras, linears[0].in_features, sizes, self.dtype)
        self._of_number[group].add_to = partial(self._add, table)
        return table

    def _dropped_table(self, group: int) -> None:
        self._of_number[group].add_to = None

    def _add(self, table: AdapterTable, x: Tensor, out: Tensor) -> None:
        if self.active_rows is not None:
            add_adapters(table, x, out, self.active_rows)
