"""The adapters of a model on the CPU: their matrices in slots, added to the products of its linears.

prepare(request) ──> install(slot, prepared) ──> inside `active(rows)` each row's products get its adapter's
files, checks        between two steps
"""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import NamedTuple

import xxhash
from torch import Tensor, nn

from rollout_engine.errors import RequestError, did_you_mean
from rollout_engine.kernels.adapters import AdapterPair, AdapterRows, AdapterTable, add_adapters
from rollout_engine.lora_request import LoRARequest
from rollout_engine.model.adapters.peft_format import LinearAdapter, naming_adapter, read_adapter
from rollout_engine.model.packing.linear_groups import LinearGroup, RowInvariantLinear
from sync.digests import tensor_bytes

_NOT_FINITE = "Check the trainer's last loss and gradients; values beyond the engine's dtype count as infinite, too."


class PreparedAdapter(NamedTuple):
    """An adapter that has been checked, in the kernel's layout."""

    pairs: dict[int, list[AdapterPair | None]]
    """Id of a `LinearGroup` -> a pair for each of its linears."""
    rank: int
    """The largest of its layers."""
    num_tensors: int
    num_bytes: int
    digest: str
    """Over names, scales and values."""


class AdapterPool:
    """Room for `max_loras` adapters of at most `max_rank` beside the linears of `module`.

    While there is no adapter, steps cost what they cost without a pool.
    """

    def __init__(self, module: nn.Module, *, max_loras: int, max_rank: int) -> None:
        self._module, self._max_loras, self._max_rank = module, max_loras, max_rank
        self._dtype = next(module.parameters()).dtype
        self._tables: dict[int, AdapterTable] = {}
        """By the id of a group, those of groups with an adapter."""
        self._installed: dict[int, PreparedAdapter] = {}
        self.num_changes = 0
        """Counts changes of the adapters that are installed."""
        self._rows: AdapterRows | None = None
        """Rows of the batch that is computed now."""
        self._last: tuple[list[int], list[int], AdapterRows | None] = ([], [], None)

    @property
    def is_empty(self) -> bool:
        """Whether no adapter is installed."""
        return not self._installed

    def prepare(self, request: LoRARequest) -> PreparedAdapter:
        """Read an adapter and check it against the model. Raises `RequestError`. Steps may run meanwhile."""
        with naming_adapter(request):
            return self._prepared(request)

    def _prepared(self, request: LoRARequest) -> PreparedAdapter:
        pairs: dict[int, list[AdapterPair | None]] = {}
        digest, rank, num_bytes = xxhash.xxh3_128(), 0, 0
        linears = read_adapter(request)
        for name, linear in sorted(linears.items()):
            group, slot = self._target(name)
            self._check(name, linear, group.children[slot])
            pair = AdapterPair.packed(linear.a, linear.b, linear.scale, self._dtype)
            if not all(math.isfinite(bound) for tensor in pair[:2] for bound in tensor.aminmax()):  # NaN is both bounds
                raise RequestError.for_field(f"tensors of '{name}'", "NaN or infinite values", "finite", _NOT_FINITE)
            pairs.setdefault(id(group), [None] * len(group.children))[slot] = pair
            digest.update(f"{name} {float(linear.scale).hex()} {len(linear.a)}\n".encode())
            for tensor in pair[:2]:
                digest.update(tensor_bytes(tensor))
                num_bytes += tensor.nbytes
            rank = max(rank, len(linear.a))
        return PreparedAdapter(pairs, rank, 2 * len(linears), num_bytes, digest.hexdigest())

    def install(self, slot: int, prepared: PreparedAdapter) -> None:
        """Have an adapter in a slot, in place of what is there. No step may be running."""
        self._clear(slot, keep=prepared.pairs)
        for key, pairs in prepared.pairs.items():
            self._table(key).set(slot, pairs)
        self._installed[slot] = prepared

    def remove(self, slot: int) -> None:
        """Free a slot. No step may be running."""
        self._clear(slot, keep=())

    def table_of(self, group: LinearGroup) -> AdapterTable | None:
        """The adapters of a group of linears, until an adapter is installed or removed; None: none changes it."""
        return self._tables.get(id(group))

    def rows(self, slots: list[int], sizes: list[int]) -> AdapterRows | None:
        """Rows of a batch of runs: `sizes[i]` rows under the adapter in slot `slots[i]`, or -1; None: base alone."""
        if self._last[0] != slots or self._last[1] != sizes:
            self._last = slots, sizes, AdapterRows.of(slots, sizes)
        return self._last[2]

    @contextmanager
    def active(self, rows: AdapterRows | None) -> Iterator[None]:
        """Inside, products of the module's linears get the adapters of `rows`."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    @cached_property
    def _linears(self) -> dict[str, tuple[LinearGroup, int]]:
        """Name of each linear that may have adapters -> its group, and its place there."""
        head = self._module.get_output_embeddings()  # type: ignore[operator]
        return {
            name: (child._group, child._slot)
            for name, child in self._module.named_modules()
            if isinstance(child, RowInvariantLinear) and child is not head
        }

    @cached_property
    def _groups(self) -> dict[int, LinearGroup]:
        return {id(group): group for group, _ in self._linears.values()}

    def _target(self, name: str) -> tuple[LinearGroup, int]:
        found = self._linears.get(name)
        if found is None:
            kinds = sorted({each.rpartition(".")[2] for each in self._linears})
            hint = did_you_mean(name, self._linears) or f"Its linear layers are called {', '.join(kinds)}."
            bound = f"a linear layer of {type(self._module).__name__}, other than its head"
            raise RequestError.for_field("target", name, bound, hint)
        return found

    def _check(self, name: str, linear: LinearAdapter, child: nn.Linear) -> None:
        if len(linear.a) > self._max_rank:
            bound = f"at most {self._max_rank} (max_lora_rank)"
            hint = f"It is the rank of '{name}'. Make the engine with max_lora_rank={len(linear.a)}."
            raise RequestError.for_field("rank", len(linear.a), bound, hint)
        came, wanted = [linear.a.shape[1], linear.b.shape[0]], [child.in_features, child.out_features]
        if came != wanted:
            hint = f"They are the inputs and outputs of '{name}': the adapter is of another base model."
            raise RequestError.for_field(f"shape of '{name}'", came, str(wanted), hint)

    def _clear(self, slot: int, keep: Collection[int]) -> None:
        """Empty a slot, but for the tables of the groups `keep`, which are set next."""
        self.num_changes += 1
        before = self._installed.pop(slot, None)
        for key in before.pairs if before else ():
            if key in keep:
                continue
            table = self._tables[key]
            table.set(slot, [None] * len(table.sizes))
            if not any(key in other.pairs for other in self._installed.values()):
                del self._tables[key]
                self._groups[key].add_to = None

    def _table(self, key: int) -> AdapterTable:
        if key not in self._tables:
            group = self._groups[key]
            sizes = [child.out_features for child in group.children]
            table = AdapterTable(self._max_loras, group.children[0].in_features, sizes, self._dtype)
            self._tables[key], group.add_to = table, partial(self._add, table)
        return self._tables[key]

    def _add(self, table: AdapterTable, x: Tensor, out: Tensor) -> None:
        if self._rows is not None:
            add_adapters(table, x, out, self._rows)
