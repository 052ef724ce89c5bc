"""The live weights of one worker, and the memory of their next values, for `WeightUpdater`.

The shadow of a weight that steps read in place is a second plain copy. A linear that runs from a packed copy has no
plain one: its next values are staged in place for packing. `pack` packs them there, next to the copies in use;
`commit` copies the few plain weights and swaps the packed copies. So a linear is held once, and during an update twice.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from rollout_engine.base.errors import LifecycleError, WeightUpdateError
from rollout_engine.kernels.memory import resident_bytes
from rollout_engine.model.backend import ShadowMemory
from rollout_engine.model.packing.packed_weights import PackedWeights
from rollout_engine.weights.coverage import storage_runs
from rollout_engine.weights.shadow import Shadow
from sync.base import Metadata
from sync.manifest import TensorSpec, describe_all, dtype_name
from sync.pieces import Lacking


class WeightHolder(Protocol):
    """Holds live weights and stages their next values. Steps may continue during every method but `commit`.

    start(...) ── place(name) ... ── pack(...) ── commit(...)
                                     settle() at any point before
    """

    @property
    def metadata(self) -> Metadata:
        """Name -> (dtype, shape) of every accepted name."""
        ...

    @property
    def takes_parts(self) -> bool:
        """Whether an update may send only the tensors that differ from the live ones."""
        ...

    def values(self, name: str) -> Tensor:
        """The live values of a name, to be read only. Raises `LifecycleError` when they were released."""
        ...

    def describe(self, names: Iterable[str]) -> list[TensorSpec]:
        """Specs, with digests, of live values. Raises as `values`."""
        ...

    def is_packed(self, name: str) -> bool:
        """Whether a commit swaps the values of a name, and does not copy them."""
        ...

    def takes_pieces(self, name: str) -> bool:
        """Whether parts of the values of a name can be replaced."""
        ...

    def num_bytes(self, names: Iterable[str]) -> int:
        """Bytes of these weights as plain values."""
        ...

    def prepare_weights(self) -> None:
        """Take memory back that was released, before an update is begun."""
        ...

    def start(self, *, inplace: bool, lacking: Lacking | None, carried: Iterable[str] | None) -> None:
        """Prepare for the first write.

        `inplace`: give the live values up. `lacking`: the pieces to be written, if the rest stays live. `carried`: the
        names of all weights, whose live values are staged first, for an update that writes only some.
        """

    def place(self, name: str, *, inplace: bool) -> Tensor:
        """The destination of the next values of a name."""
        ...

    def pack(self, *, inplace: bool, lacking: Lacking | None, names: Iterable[str]) -> None:
        """Make the next copies from the staged values; `names`: all that a commit replaces, if `lacking` is None."""

    def commit(self, *, lacking: Lacking | None) -> None:
        """Make the next values live, while no forward is running."""

    def settle(self) -> None:
        """Drop the staged values, after a commit or instead of one."""

    def release(self) -> None:
        """Free memory for next values, which the next update takes again."""

    def copies(self) -> Iterator[Tensor]:
        """The copies in this process that updates and linears hold now in addition to the live weights."""
        ...

    @property
    def num_resident_bytes(self) -> int:
        """Bytes of `copies` that take memory now."""
        ...

    @property
    def num_shadow_bytes(self) -> int:
        """Bytes that updates hold now, in addition to the live weights."""
        ...

    def num_bytes_to_shadow(self) -> int:
        """Bytes that an update with a shadow would allocate."""
        ...

    def make_room_for_shadow(self) -> bool:
        """Whether memory suffices for a shadow: counted on the host, taken as it is written; allocated on a device."""
        ...

    def beside_steps(self) -> AbstractContextManager[object]:
        """Order work launched inside after all work launched before; later steps neither wait for it nor delay it."""
        ...


class HeldWeights:
    """Satisfies `WeightHolder` for the weights of this process.

    Args:
        targets: every accepted name as a view of live storage.
        packed: the copies that linears run from.
        memory: memory for shadows, and the copy from there over the live weights.
        prepare: allocates memory again that the live weights have released.
        committed: called behind each commit, and drops results of the weights before.
    """

    def __init__(
        self,
        targets: Mapping[str, Tensor],
        packed: PackedWeights,
        memory: ShadowMemory,
        prepare: Callable[[], object] = lambda: None,
        committed: Callable[[], object] = lambda: None,
    ) -> None:
        self._live = packed.take_over({name: view.detach() for name, view in targets.items()})
        """Views by name; on meta if `packed` alone holds the values."""
        self.metadata = {name: (dtype_name(view.dtype), tuple(view.shape)) for name, view in self._live.items()}
        self._packed, self._memory, self._prepare, self._committed = packed, memory, prepare, committed
        self._shadow = Shadow(memory)
        self._on_host = all(view.device.type in ("cpu", "meta") for view in self._live.values())

    @property
    def takes_parts(self) -> bool:
        return self._on_host and not self._packed.is_without_values

    def values(self, name: str) -> Tensor:
        """The live values of a name: a view if steps read them, else a copy."""
        if self._packed.holds(name):
            return self._packed.plain(name)
        view = self._live[name]
        if view.numel() and not view.untyped_storage().nbytes():
            raise LifecycleError(f"'{name}' has no values now: weights were released. Wake up, or send a whole update.")
        return view

    def describe(self, names: Iterable[str]) -> list[TensorSpec]:
        with self.beside_steps():
            return describe_all((name, self.values(name)) for name in names)

    def is_packed(self, name: str) -> bool:
        return self._packed.holds(name)

    def takes_pieces(self, name: str) -> bool:
        return self._packed.takes_pieces(name) if self._packed.holds(name) else self._live[name].is_contiguous()

    def num_bytes(self, names: Iterable[str]) -> int:
        return sum(self._live[name].nbytes for name in names)

    def prepare_weights(self) -> None:
        self._prepare()

    def start(self, *, inplace: bool, lacking: Lacking | None, carried: Iterable[str] | None) -> None:
        if inplace:
            self._shadow.clear()
            self._packed.surrender()
        else:
            self._reserve_shadow()
        if lacking is not None:
            self._packed.carry_changed({name: part and part.elements for name, part in lacking.items()})
        if carried is not None:
            self._packed.carry()
            for view in [] if inplace else self._plain(carried):
                self._shadow.of(view).copy_(view)

    def place(self, name: str, *, inplace: bool) -> Tensor:
        if self._packed.holds(name):
            return self._packed.staging(name)
        return self._plain_place(self._live[name], inplace=inplace)

    def pack(self, *, inplace: bool, lacking: Lacking | None, names: Iterable[str]) -> None:
        if lacking is not None:
            parts = {name: part for name, part in lacking.items() if not self._packed.holds(name)}
            self._shadow.plan_some((self._live[name], storage_runs(self._live[name], parts[name])) for name in parts)
            changed = {self._live[name].untyped_storage().data_ptr() for name in parts}
            self._packed.pack_changed(self._shadow.complete_view, changed)
        else:
            self._packed.pack(lambda view: self._plain_place(view, inplace=inplace))
            self._shadow.plan([] if inplace else self._plain(names))

    def commit(self, *, lacking: Lacking | None) -> None:
        self._shadow.commit()
        self._packed.swap() if lacking is None else self._packed.swap_changed()
        self._committed()

    def settle(self) -> None:
        self._packed.settle()

    def release(self) -> None:
        self._shadow.clear()

    def copies(self) -> Iterator[Tensor]:
        yield from self._packed.copies()
        yield from self._shadow.tensors()

    @property
    def num_resident_bytes(self) -> int:
        copies = list(self.copies())
        on_host = resident_bytes([copy for copy in copies if copy.device.type == "cpu"])
        return on_host + sum(copy.nbytes for copy in copies if copy.device.type != "cpu")

    @property
    def num_shadow_bytes(self) -> int:
        return self._shadow.num_bytes + self._packed.num_spare_bytes

    @property
    def num_free_bytes(self) -> int:
        """Bytes that shadows may still take."""
        return self._memory.num_free_bytes

    def num_bytes_to_shadow(self) -> int:
        return self._shadow.num_bytes_lacking(self._plain(self._live)) + self._packed.num_bytes_to_spare

    def make_room_for_shadow(self) -> bool:
        if self.num_bytes_to_shadow() > self.num_free_bytes:
            return False
        try:
            self._reserve_shadow()
        except WeightUpdateError:
            return False
        return True

    def beside_steps(self) -> AbstractContextManager[object]:
        return self._memory.beside_steps()

    def _reserve_shadow(self) -> None:
        if not self._on_host:
            self._shadow.reserve(self._plain(self._live))

    def _plain_place(self, view: Tensor, *, inplace: bool) -> Tensor:
        return view if inplace else self._shadow.of(view)

    def _plain(self, names: Iterable[str]) -> list[Tensor]:
        """The live views of those names that steps read in place."""
        return [self._live[name] for name in names if not self._packed.holds(name)]
