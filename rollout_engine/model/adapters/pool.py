"""The adapters of a model: their matrices in slots, added to the products of its linears.

prepare(request) ──> install(slot, prepared) ──> steps add each row's adapter to its products
files, checks        between two steps

If a model is cut over ranks, each has the columns of A that its inputs are, and the rows of B that its outputs are.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import xxhash
from torch import Tensor, nn

from rollout_engine.base.errors import RequestError, did_you_mean
from rollout_engine.base.lora_request import LoRARequest
from rollout_engine.kernels.adapters import AdapterRows
from rollout_engine.model.adapters.peft_format import LinearAdapter, naming_adapter, read_adapter
from sync.checkpoint_names import CheckpointNames
from sync.digests import tensor_bytes
from sync.errors import ManifestMismatch

_NOT_FINITE = "Check the trainer's last loss and gradients; values beyond the engine's dtype count as infinite, too."


class Pair(Protocol):
    """One adapter's matrices for one linear layer, packed for a kernel."""

    @property
    def a(self) -> Tensor: ...

    @property
    def b(self) -> Tensor: ...


class Table(Protocol):
    """The pairs of all slots for linears that share an input, as a kernel reads them."""

    sizes: list[int]

    def set(self, slot: int, pairs: Sequence[Any]) -> None:
        """Give an adapter its pairs, one for each linear; None for one that it does not change."""


class Features(Protocol):
    """Some features of a linear layer, or all, as `model.ranks.share.Share`."""

    @property
    def whole(self) -> int:
        """Number of all features of the layer."""
        ...

    @property
    def rows(self) -> slice: ...

    @property
    def is_whole(self) -> bool: ...


class Target(NamedTuple):
    """A linear layer that may have adapters."""

    group: int
    """Number of the linears that share its input."""
    place: int
    """Its place among them."""
    linear: nn.Linear
    inputs: Features
    """The input features that this rank multiplies: all, unless the model is cut over ranks."""
    outputs: Features
    """The output features that this rank computes."""

    def own(self, adapter: LinearAdapter) -> LinearAdapter:
        """An adapter with this rank's columns of A, and rows of B."""
        return adapter._replace(a=adapter.a[:, self.inputs.rows], b=adapter.b[self.outputs.rows])


Pairs = dict[int, list[Any]]
"""Number of a group -> a `Pair` for each of its linears, or None."""


@dataclass(frozen=True, eq=False)
class PreparedAdapter:
    """An adapter that has been checked, in the kernel's layout."""

    pairs: Pairs
    """The adapter's matrices, cut to the features of this rank."""
    rank: int
    """The largest of its layers."""
    num_tensors: int
    num_bytes: int
    digest: str
    """Over names, scales and values."""


class Adapters(Protocol):
    """The adapters of a model, which may be cut over ranks."""

    def prepare_adapter(self, request: LoRARequest) -> PreparedAdapter:
        """Read an adapter and check it against the model. Raises `RequestError`. Steps may run meanwhile."""
        ...

    def install(self, slot: int, prepared: PreparedAdapter) -> None:
        """Put an adapter in a slot, in place of the one there. No step may be running on the host."""

    def remove(self, slot: int) -> None:
        """Free a slot. No step may be running on the host."""


class AdapterPool(ABC):
    """Room for `max_loras` adapters of at most `max_rank` added to the linears of `module`.

    While there is no adapter, steps cost as much as without a pool. Satisfies `Adapters`.
    """

    block_rows: ClassVar[int]
    """Most rows of one adapter that the kernel computes together."""

    def __init__(
        self,
        module: nn.Module,
        *,
        max_loras: int,
        max_rank: int,
        names: CheckpointNames = CheckpointNames(),  # noqa: B008 (it is frozen)
        elsewhere: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """`names`: the further names that an adapter may have for the linears of `module`.

        `elsewhere`: by name, the input and output features of linears that other stages of the model have.
        """
        self._elsewhere = elsewhere or {}
        self._module, self._max_loras, self._max_rank, self._names = module, max_loras, max_rank, names
        self.dtype = next(module.parameters()).dtype
        self._tables: dict[int, Any] = {}
        """By the number of a group, those of groups with an adapter."""
        self._installed: dict[int, Pairs] = {}
        self.num_changes = 0
        """Counts changes of the adapters that are installed."""
        self._last: tuple[list[int], list[int], AdapterRows | None] = ([], [], None)

    @property
    def is_empty(self) -> bool:
        """Whether no adapter is installed."""
        return not self._installed

    def prepare_adapter(self, request: LoRARequest) -> PreparedAdapter:
        with naming_adapter(request):
            return self.check_adapter(self.read_linears(request))

    def read_linears(self, request: LoRARequest) -> dict[str, LinearAdapter]:
        """The matrices of an adapter by the names of the module's linears, if it has such; others as they are.

        Raises `RequestError` if it cannot be served.
        """
        linears = read_adapter(request)
        try:
            used = self._names.used(linears.items(), {**self._linears, **self._elsewhere})
        except ManifestMismatch as problem:
            raise RequestError.for_field("tensors", str(problem), "one pair of matrices for each linear") from None
        if not used:
            bound = f"the name of a linear layer of {type(self._module).__name__}"
            hint = "It adapts only parts that are not served: those of a composite for images, video or audio."
            raise RequestError.for_field("target", next(iter(linears)), bound, hint)
        return dict(used)

    def check_adapter(self, linears: Mapping[str, LinearAdapter]) -> PreparedAdapter:
        """Check the matrices of an adapter, and lay them out. Raises `RequestError`."""
        packed: dict[str, Pair] = {}
        digest, rank, num_bytes = xxhash.xxh3_128(), 0, 0
        for name, linear in sorted(linears.items()):
            self._check(name, linear, self._features(name))
            pair = packed[name] = self._pack_linear(linear)
            tensors = pair.a, pair.b
            if not all(math.isfinite(bound) for tensor in tensors for bound in tensor.aminmax()):  # NaN is both bounds
                raise RequestError.for_field(f"tensors of '{name}'", "NaN or infinite values", "finite", _NOT_FINITE)
            digest.update(f"{name} {float(linear.scale).hex()} {len(linear.a)}\n".encode())
            for tensor in tensors:
                digest.update(tensor_bytes(tensor))
                num_bytes += tensor.nbytes
            rank = max(rank, len(linear.a))
        return PreparedAdapter(self.pairs(linears, packed), rank, 2 * len(linears), num_bytes, digest.hexdigest())

    def pairs(self, linears: Mapping[str, LinearAdapter], packed: Mapping[str, Pair] | None = None) -> Pairs:
        """Lay out this rank's part of matrices that have been checked. `packed`: the whole of each."""
        found: Pairs = {}
        for name, linear in linears.items():
            if name in self._elsewhere:
                continue
            target = self._target(name)
            is_whole = target.inputs.is_whole and target.outputs.is_whole
            pair = packed[name] if packed and is_whole else self._pack_linear(target.own(linear))
            found.setdefault(target.group, [None] * len(self._groups[target.group]))[target.place] = pair
        return self._place_pairs(found)

    def install(self, slot: int, prepared: PreparedAdapter) -> None:
        self.put(slot, prepared.pairs)

    def put(self, slot: int, pairs: Pairs) -> None:
        """Put an adapter's matrices in a slot, in place of those there. No step may be running on the host."""
        self._clear(slot, keep=pairs)
        for key, each in pairs.items():
            self._table(key).set(slot, each)
        self._installed[slot] = pairs

    def remove(self, slot: int) -> None:
        self._clear(slot, keep=())

    def rows(self, slots: list[int], sizes: list[int]) -> AdapterRows | None:
        """Rows of a batch of runs: `sizes[i]` rows under the adapter in slot `slots[i]`, or -1; None: base alone."""
        if self._last[0] != slots or self._last[1] != sizes:
            self._last = slots, sizes, AdapterRows.of(slots, sizes, self.block_rows)
        return self._last[2]

    @abstractmethod
    def _find_targets(self) -> dict[str, Target]:
        """By name, the linears that may have adapters."""

    @abstractmethod
    def _pack_linear(self, linear: LinearAdapter) -> Pair:
        """The matrices for the kernel, in the host's memory."""

    def _place_pairs(self, pairs: Pairs) -> Pairs:
        """The same pairs on the device of the steps."""
        return pairs

    @abstractmethod
    def _made_table(self, group: int) -> Table:
        """The table of a group that has an adapter from now on."""

    @abstractmethod
    def _dropped_table(self, group: int) -> None:
        """Called when a group has no adapter any more."""

    @cached_property
    def _linears(self) -> dict[str, Target]:
        return self._find_targets()

    @cached_property
    def _groups(self) -> dict[int, list[nn.Linear]]:
        """The linears of each group, in order."""
        found: dict[int, list[nn.Linear]] = {}
        for target in sorted(self._linears.values(), key=lambda target: target.place):
            found.setdefault(target.group, []).append(target.linear)
        return found

    def _target(self, name: str) -> Target:
        found = self._linears.get(name)
        if found is None:
            known = [*self._linears, *self._elsewhere]
            kinds = sorted({each.rpartition(".")[2] for each in known})
            hint = did_you_mean(name, known) or f"Its linear layers are called {', '.join(kinds)}."
            bound = f"a linear layer of {type(self._module).__name__}, other than its head"
            raise RequestError.for_field("target", name, bound, hint)
        return found

    def _features(self, name: str) -> tuple[int, int]:
        """The input and output features of a linear of any stage, on all ranks together."""
        if name in self._elsewhere:
            return self._elsewhere[name]
        target = self._target(name)
        return target.inputs.whole, target.outputs.whole

    def _check(self, name: str, linear: LinearAdapter, features: tuple[int, int]) -> None:
        if len(linear.a) > self._max_rank:
            bound = f"at most {self._max_rank} (max_lora_rank)"
            hint = f"It is the rank of '{name}'. Make the engine with max_lora_rank={len(linear.a)}."
            raise RequestError.for_field("rank", len(linear.a), bound, hint)
        came, wanted = [linear.a.shape[1], linear.b.shape[0]], list(features)
        if came != wanted:
            hint = f"They are the inputs and outputs of '{name}': the adapter is of another base model."
            raise RequestError.for_field(f"shape of '{name}'", came, str(wanted), hint)

    def _clear(self, slot: int, keep: Collection[int]) -> None:
        """Empty a slot, but for the tables of the groups `keep`, which are set next."""
        self.num_changes += 1
        before = self._installed.pop(slot, None)
        for key in before or ():
            if key in keep:
                continue
            table = self._tables[key]
            table.set(slot, [None] * len(table.sizes))
            if not any(key in other for other in self._installed.values()):
                del self._tables[key]
                self._dropped_table(key)

    def _table(self, group: int) -> Table:
        if group not in self._tables:
            self._tables[group] = self._made_table(group)
        table: Table = self._tables[group]
        return table
