"""A weight update is a transaction on the live model: all of it, or nothing.

    begin(manifest) ──> stage(pairs) ... ──> verify() ──> commit(version)
       refuse: nothing changed   into the shadow   complete,   live := shadow, version := v
                                                   digests,
                                                   finite,     confirm(): the digest of what is live then
                                                   packed      abort() before commit: the shadow is forgotten

Until the first byte of `commit`, what steps compute with and the version are untouched whatever goes wrong. Should
`commit` itself fail, `dirty` stays set and only a complete update clears it.

`commit` is all that steps wait for. `confirm`, beside the steps that follow, reads the live weights and tells their
digest.

The shadow of a weight that steps read where it lies is a second plain copy. A linear which runs from a packed copy has
no plain one: its next values are gathered where they will be packed. `verify` packs them there, beside the copies in
use; `commit` copies the few plain weights and lets the packed copies change places. So a linear is held once, and
during an update twice.

An update in place has no shadow: the first staged byte sets `dirty`, and what came before it is gone.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from rollout_engine.errors import DirtyWeightsError, LifecycleError
from rollout_engine.execution.manifest_checks import ManifestChecks
from rollout_engine.execution.on_demand import OnDemand
from rollout_engine.execution.shadow import HostMoves, Moves, Shadow
from rollout_engine.model.packed_weights import PackedWeights
from rollout_engine.model.residence import resident_bytes
from sync import errors
from sync.arrival import Arrivals
from sync.base import WeightReceiver
from sync.cast_notice import CastNotice
from sync.looks import Arrival
from sync.manifest import TensorSpec, WeightManifest, describe_all, dtype_name, first_names, total_digest


class WeightUpdater:
    """The live weights of one worker, and the one transaction that may be open on them.

    Args:
        targets: every accepted name, the module's and the checkpoint's, as a view of live storage.
        aliases: groups of names that are one and the same view (tied weights).
        packed: the copies that linears run from.
        version: policy version of the weights that are live now.
        prepare: called when a transaction opens: takes memory again that the live weights have given back.
        moves: how next values come over the live ones.
    """

    def __init__(
        self,
        targets: Mapping[str, Tensor],
        aliases: Iterable[Iterable[str]],
        packed: PackedWeights,
        *,
        version: int = 0,
        prepare: Callable[[], object] = lambda: None,
        moves: Moves | None = None,
    ) -> None:
        self._checks = ManifestChecks(targets, aliases)
        self._live = packed.take_over({name: view.detach() for name, view in targets.items()})
        """Those that `packed` holds are on meta."""
        self._packed = packed
        self._prepare = prepare
        self.cast_notice = CastNotice()
        self._moves = moves or HostMoves()
        self._shadow = Shadow(self._moves)
        self._open: WeightManifest | None = None
        self._committed: WeightManifest | None = None
        """To be confirmed."""
        self._inplace = self._allow_nonfinite = self._given_up = False
        """Of the open transaction; `_given_up`: in place, the live weights are being overwritten."""
        self._partial, self._carried = False, True
        """Whether the last transaction is partial; whether the weights it does not send were copied beside it."""
        self._placing = threading.Lock()
        self._staged: dict[str, Arrival] = {}
        """By name, what lies where it was gathered."""
        self._verified = False
        self.pack_seconds = 0.0
        """What `verify` last took to lay weights out for the kernels."""
        self.version = version
        self.dirty = False
        """The weights must not be used: an update ended half-way, or is under way in place, or they were released."""
        self.forgotten = False
        """They were released, and no complete update has come since."""

    def metadata(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of every accepted name, both namings."""
        return {name: (dtype_name(view.dtype), tuple(view.shape)) for name, view in self._live.items()}

    def digest(self) -> str:
        """Total digest of the live weights under the module's own names; tied weights count once.

        Raises `LifecycleError` when they were released.
        """
        if self._open is not None and self._inplace:
            raise LifecycleError("digest: an update is open; commit or abort it first.")
        return self._live_digest(self._checks.canonical())

    def live(self, verb: str) -> Mapping[str, Tensor]:
        """The module's own names and their live values, tied weights once; not to be written.

        Raises, naming `verb`, where values may not be live ones: `LifecycleError` while an update is open,
        `DirtyWeightsError` when `dirty`.
        """
        if self._open is not None:
            raise LifecycleError(f"{verb}: an update is open; commit or abort it first.")
        if self.dirty:
            raise DirtyWeightsError.for_verb(verb, forgotten=self.forgotten)
        return OnDemand(self._checks.canonical(), self.values)

    def values(self, name: str) -> Tensor:
        """The live values of a name, to be read only: a view where steps read them, else a copy.

        Raises `LifecycleError` when they were released.
        """
        if self._packed.holds(name):
            return self._packed.plain(name)
        view = self._live[name]
        if view.numel() and not view.untyped_storage().nbytes():
            raise LifecycleError(f"'{name}' has no values now: weights were released. Wake up, or send a whole update.")
        return view

    def copies(self) -> Iterator[Tensor]:
        """What an update or a linear holds beside the live weights, as far as it exists now."""
        yield from self._packed.copies()
        yield from self._shadow.tensors()

    def begin(
        self,
        manifest: WeightManifest,
        *,
        reset_version: bool = False,
        inplace: bool = False,
        allow_nonfinite: bool = False,
        partial: bool = False,
    ) -> bool:
        """Open a transaction; False when exactly these weights are live under this version already (nothing to do).

        `inplace`: without a shadow; nothing may be computed from the first `stage` to the commit. `allow_nonfinite`:
        take NaN and infinities. `partial`: the manifest may leave weights out, which keep their values.

        Raises `LifecycleError` when one is open, `ManifestMismatch` when names, shapes, dtypes or ties differ from the
        live weights, `StaleVersion` when the version does not move forward and `reset_version` is not set,
        `DirtyWeightsError` for a partial update of incomplete weights.
        """
        if self._open is not None:
            raise LifecycleError(f"begin: an update to version {self._open.version} is open; commit or abort it first.")
        self._checks.check(manifest, self.metadata(), partial=partial)
        if partial and self.dirty:
            raise DirtyWeightsError.for_verb("update_weights(partial=True)", forgotten=self.forgotten)
        self._prepare()
        if self._is_live(manifest):
            return False
        self._check_version(manifest.version, reset_version)
        self._open, self._staged, self._verified = manifest, {}, False
        self._inplace, self._allow_nonfinite, self._given_up = inplace, allow_nonfinite, False
        self._partial, self._carried = partial, not partial
        return True

    def stage(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors of the manifest into the shadow, as many as have come. A name staged twice keeps the later."""
        specs, arrivals = self._specs("stage"), Arrivals()
        with self._moves.beside_steps():
            try:
                for name, tensor in pairs:
                    _check_form(specs, name, tensor)
                    arrivals.take(name, self._place(name), tensor.detach())
            finally:
                self._staged |= arrivals.told()

    def receive(
        self,
        receiver: WeightReceiver,
        manifest: WeightManifest | None = None,
        *,
        check: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Stage what `receiver` brings of `manifest` (None: all of the open one), straight to where it is gathered.

        `check` is called as each tensor comes: what it raises ends the receiving.
        """
        specs = self._specs("receive")

        def place(name: str) -> Tensor:
            check(name)
            return self._place(name)

        wanted = self._opened("receive") if manifest is None else manifest
        with self._moves.beside_steps():
            self._staged |= receiver.receive_into(OnDemand(specs, place), wanted)

    def verify(self) -> str:
        """Raise `ChecksumMismatch`, naming tensors, unless all arrived, unchanged and finite; then pack them.

        Returns the total digest of what is staged. Nothing that a step reads is touched, so steps may go on in another
        thread.
        """
        manifest, specs = self._opened("verify"), self._specs("verify")
        if absent := [name for name in specs if name not in self._staged]:
            raise errors.ChecksumMismatch(
                f"{len(absent)} tensors of the manifest never arrived: {first_names(absent)}."
            )
        for name, spec in specs.items():
            arrived = self._staged[name]
            if arrived.digest != spec.digest:
                raise errors.ChecksumMismatch(f"'{name}' changed on the way: its digest is not the manifest's.")
            if not self._allow_nonfinite and not arrived.finite:
                raise errors.ChecksumMismatch(f"'{name}' has values that are NaN or infinite: check the last loss.")
        start = time.perf_counter()
        self._packed.pack(self._shadow_of)
        self.pack_seconds = time.perf_counter() - start
        written = self._checks.canonical() if self._partial else specs
        self._shadow.plan([] if self._inplace else self._plain(written))
        self._verified = True
        return manifest.digest

    def commit(self, version: int | None = None) -> None:
        """Make the shadow live.

        Call it where no forward is running. Raises `LifecycleError` before `verify`, or for a `version` that is not the
        open one; `DirtyWeightsError` when it fails half-way, which leaves `dirty` set.
        """
        manifest = self._opened("commit")
        if not self._verified:
            raise LifecycleError("commit: the open update is not verified; call verify first.")
        if version not in (None, manifest.version):
            raise LifecycleError(f"commit: version {version} is not open, version {manifest.version} is.")
        self.dirty = True
        try:
            self._shadow.commit()
            self._packed.swap()
        except Exception as problem:
            raise _half_way(manifest, problem) from problem
        finally:
            self._open = None
        self._committed = manifest
        self.version, self.dirty, self.forgotten = manifest.version, False, False

    def confirm(self) -> str:
        """The digest of the live weights under the names of the manifest that was committed last; after a partial
        update that of all live weights, as `digest`. Steps may go on.

        Raises `DirtyWeightsError`, and leaves `dirty` set, when they are not what was staged.
        """
        manifest, self._committed = self._committed, None
        if manifest is None:
            raise LifecycleError("confirm: no commit waits for it; call commit first.")
        try:
            packed = [spec for spec in manifest.tensors if self._packed.holds(spec.name)]
            plain = [spec.name for spec in manifest.tensors if not self._packed.holds(spec.name)]
            found = total_digest([*packed, *self._read((name, self._live[name]) for name in plain)])
            if found != manifest.digest:
                raise errors.ChecksumMismatch("the live weights are not the ones that were staged")
        except Exception as problem:
            self.dirty = True
            raise _half_way(manifest, problem) from problem
        return self.digest() if self._partial else found

    def abort(self) -> None:
        """Forget what was staged. No-op when nothing is open. `dirty` stays set if that was in place."""
        self._open, self._staged, self._verified = None, {}, False
        self._packed.settle()

    def release(self, *, forget: bool) -> None:
        """Free the shadow, which the next update makes again. `forget`: the live weights lose their values too."""
        assert self._open is None, "the weights of an open update are released"
        self._shadow.clear()
        self.dirty |= forget
        self.forgotten |= forget

    @property
    def is_open(self) -> bool:
        """Whether a transaction is."""
        return self._open is not None

    @property
    def num_resident_bytes(self) -> int:
        """Bytes of `copies` that take memory now."""
        on_host = [copy for copy in self.copies() if copy.device.type == "cpu"]
        return resident_bytes(on_host) + sum(copy.nbytes for copy in self.copies() if copy.device.type != "cpu")

    @property
    def num_shadow_bytes(self) -> int:
        """Bytes that updates hold beside the live weights now."""
        return self._shadow.num_bytes + self._packed.num_spare_bytes

    @property
    def room_for_shadow(self) -> int:
        """Bytes free for an update's shadow where weights lie."""
        return self._moves.room

    def num_bytes_to_shadow(self) -> int:
        """Bytes that an update with a shadow takes beside what is held already."""
        absent = [view.untyped_storage() for view in self._plain(self._live) if not self._shadow.holds(view)]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in absent}
        return sum(sizes.values()) + self._packed.num_bytes_to_spare

    def _place(self, name: str) -> Tensor:
        """Where the next values of a name are to be written, now."""
        with self._placing:
            self._verified = False
            self._staged.pop(name, None)
            if self._inplace and not self._given_up:
                self._given_up = self.dirty = True
                self._shadow.clear()
                self._packed.surrender()
            if not self._carried:
                self._carry()
            return self._next_of(name)

    def _carry(self) -> None:
        """Gather the live values of every weight as the next ones, before a partial update writes over some."""
        self._packed.carry()
        if not self._inplace:
            for view in self._plain(self._checks.canonical()):
                self._shadow_of(view).copy_(view)
        self._carried = True

    def _opened(self, verb: str) -> WeightManifest:
        if self._open is None:
            raise LifecycleError(f"{verb}: no update is open; call begin first.")
        return self._open

    def _specs(self, verb: str) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self._opened(verb).tensors}

    def _next_of(self, name: str) -> Tensor:
        """Where the next values of a name are gathered."""
        return self._packed.staging(name) if self._packed.holds(name) else self._shadow_of(self._live[name])

    def _shadow_of(self, view: Tensor) -> Tensor:
        """Where the next values of a plain live view are to be written."""
        return view if self._inplace else self._shadow.of(view)

    def _plain(self, names: Iterable[str]) -> list[Tensor]:
        """The live views of those names that steps read where they lie."""
        return [self._live[name] for name in names if not self._packed.holds(name)]

    def _live_digest(self, names: Iterable[str]) -> str:
        return total_digest(self._read((name, self.values(name)) for name in names))

    def _read(self, pairs: Iterable[tuple[str, Tensor]]) -> list[TensorSpec]:
        """What lies there, while steps may go on."""
        with self._moves.beside_steps():
            return describe_all(pairs)

    def _is_live(self, manifest: WeightManifest) -> bool:
        if self.dirty or manifest.version != self.version:
            return False
        return self._live_digest(spec.name for spec in manifest.tensors) == manifest.digest

    def _check_version(self, version: int, reset_version: bool) -> None:
        if version > self.version or reset_version or (self.dirty and version == self.version):
            return
        same = version == self.version
        what = "is live with other weights" if same else f"is older than the live version {self.version}"
        advice = "Send a higher one, or reset_version=True if the trainer restarted."
        raise errors.StaleVersion(f"Version {version} {what}. {advice}")


def _check_form(specs: Mapping[str, TensorSpec], name: str, tensor: Tensor) -> None:
    spec = specs.get(name)
    if spec is None:
        raise errors.ManifestMismatch(f"'{name}' is not in the manifest of the open update.")
    came = (dtype_name(tensor.dtype), tuple(tensor.shape))
    if came != (spec.dtype, spec.shape):
        raise errors.ManifestMismatch(f"'{name}' came as {came}; the manifest says {(spec.dtype, spec.shape)}.")


def _half_way(manifest: WeightManifest, problem: Exception) -> DirtyWeightsError:
    what = f"The commit of version {manifest.version} failed: {problem}"
    return DirtyWeightsError(f"{what}. Live weights may be a mixture: send them again.")
