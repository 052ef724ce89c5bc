"""The adapters of a model on a device, added to the products of its fused decoder."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from rollout_engine.kernels.adapters import AdapterRows
from rollout_engine.kernels.triton.adapters import BLOCK_ROWS, AdapterBatch, AdapterPair, AdapterTable
from rollout_engine.kernels.triton.rounding import compiles_kernels
from rollout_engine.model.adapters.peft_format import LinearAdapter
from rollout_engine.model.adapters.pool import AdapterPool, Pairs, Target
from rollout_engine.model.cuda.copy_stream import CopyStream
from rollout_engine.model.packing.linear_groups import linears_by_input
from rollout_engine.model.ranks.cut import inputs_of, outputs_of


class CudaAdapterPool(AdapterPool):
    """Matrices are copied concurrently with steps, on `stream`; steps launched before keep the former ones."""

    block_rows = BLOCK_ROWS

    def __init__(self, module: nn.Module, *, stream: CopyStream, **sizes: Any) -> None:
        super().__init__(module, **sizes)
        self._stream, self._device = stream, next(module.parameters()).device
        self._compiled: set[tuple[int, tuple[int, ...]]] = set()
        """Inputs and outputs of groups whose kernels have run."""
        self._numbers: dict[int, int] = {}
        """Number of each group's table; no other table ever has it."""
        self._count = count()

    @property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """The tables, and the highest rank in each: all that a captured step depends on."""
        return tuple((self._numbers[group], table.max_rank) for group, table in sorted(self._tables.items()))

    def add(self, group: int, x: Tensor, out: Tensor, batch: AdapterBatch) -> None:
        """Add the adapters of a batch to a product [T, N] of linears, identified by the id of the first, in place."""
        table = self._tables.get(group)
        if table is not None:
            table.add(x, out, batch)

    def whole_batch(self, slot: int, num_rows: int) -> AdapterBatch:
        """A batch of `num_rows` rows under one adapter."""
        plan = AdapterRows.of([slot], [num_rows], BLOCK_ROWS)
        assert plan is not None, "every row has an adapter"
        return AdapterBatch.of(plan, self._device)

    def _find_targets(self) -> dict[str, Target]:
        head = self._module.get_output_embeddings()  # type: ignore[operator]
        names = {id(child): name for name, child in self._module.named_modules()}
        return {
            names[id(child)]: Target(id(group[0]), place, child, inputs_of(child), outputs_of(child))
            for group in linears_by_input(self._module, (nn.Linear,))
            for place, child in enumerate(group)
            if child is not head
        }

    def _pack_linear(self, linear: LinearAdapter) -> AdapterPair:
        return AdapterPair.packed(linear.a.cpu(), linear.b.cpu(), linear.scale, self.dtype)

    def _place_pairs(self, pairs: Pairs) -> Pairs:
        with self._stream.enter():
            placed = {
                group: [None if pair is None else pair.to(self._device) for pair in each]
                for group, each in pairs.items()
            }
            if compiles_kernels():
                for group, each in placed.items():
                    self._compile(group, each)
        return placed

    @torch.inference_mode()
    def _compile(self, group: int, pairs: Sequence[AdapterPair | None]) -> None:
        """Run the kernels of a group once over no rows, so that no step waits for the compiler."""
        linears = self._groups[group]
        shape = linears[0].in_features, tuple(child.out_features for child in linears)
        if shape in self._compiled:
            return
        self._compiled.add(shape)
        table, none = self._new_table(group, 1), torch.zeros(1, dtype=torch.int32, device=self._device)
        table.set(0, pairs)
        x, out = (torch.zeros(1, n, dtype=self.dtype, device=self._device) for n in (shape[0], sum(shape[1])))
        table.add(x, out, AdapterBatch(none, torch.zeros(1, 3, dtype=torch.int32, device=self._device)))

    def _made_table(self, group: int) -> AdapterTable:
        self._numbers[group] = next(self._count)
        return self._new_table(group, self._max_loras)

    def _dropped_table(self, group: int) -> None:
        """Do nothing: there are no other references to it."""

    def _new_table(self, group: int, num_slots: int) -> AdapterTable:
        linears = self._groups[group]
        sizes = [child.out_features for child in linears]
        return AdapterTable(num_slots, linears[0].in_features, sizes, self.dtype, self._device)
