"""A weight update is a transaction on the live model: all of it, or nothing.

    begin(manifest) ──> stage(pairs) ... ──> verify() ──> commit(version)
       refuse: nothing changed   into the shadow   complete,   live := shadow, version := v
                                                   digests,
                                                   finite,     confirm(): the digest of what is live then
                                                   packed      abort() before commit: the shadow is forgotten

Until the first byte of `commit`, neither the version nor the weights that steps use change, whatever goes wrong. If
`commit` itself fails, `dirty` stays set and only a complete update clears it.

Steps wait for `commit` alone. `confirm` runs beside the steps that follow: it reads the live weights again and returns
their digest.

The shadow of a weight that steps read in place is a second plain copy. A linear that runs from a packed copy has no
plain one: its next values are staged where they will be packed. `verify` packs them there, beside the copies in use;
`commit` copies the few plain weights and swaps the packed copies. So a linear is held once, and during an update twice.

An update in place has no shadow: the first staged byte sets `dirty`, and the old values are lost.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from rollout_engine.errors import DirtyWeightsError, LifecycleError, WeightUpdateError
from rollout_engine.kernels.memory import resident_bytes
from rollout_engine.messages import UpdateOptions
from rollout_engine.model.backend import ShadowMemory
from rollout_engine.model.packing.packed_weights import PackedWeights
from rollout_engine.weights.coverage import storage_runs
from rollout_engine.weights.known_weights import KnownWeights
from rollout_engine.weights.lazy_tensors import LazyTensors
from rollout_engine.weights.manifest_checks import ManifestChecks, check_version
from rollout_engine.weights.shadow import Shadow
from rollout_engine.weights.staged_update import StagedUpdate
from sync import errors
from sync.base import WeightReceiver
from sync.cast_notice import CastNotice
from sync.manifest import TensorSpec, WeightManifest, describe_all, dtype_name, total_digest
from sync.pieces import Lacking, described, num_bytes_lacking
from sync.tensor_writer import HOST_WRITER, TensorWriter, WriteBatch

_DEFAULT_OPTIONS = UpdateOptions()


class WeightUpdater:
    """The live weights of one worker, and the one transaction that may be open on them.

    Args:
        targets: every accepted name, the module's and the checkpoint's, as a view of live storage.
        aliases: groups of names that are one and the same view (tied weights).
        packed: the copies that linears run from.
        shadow_memory: memory for shadows, and the copy from there over the live weights.
        prepare: called when a transaction opens; allocates memory again that the live weights have released.
        writer: writes tensors that arrive to where they are staged.
    """

    def __init__(
        self,
        targets: Mapping[str, Tensor],
        aliases: Iterable[Iterable[str]],
        packed: PackedWeights,
        shadow_memory: ShadowMemory,
        *,
        prepare: Callable[[], object] = lambda: None,
        writer: TensorWriter = HOST_WRITER,
    ) -> None:
        self._checks = ManifestChecks(targets, aliases)
        self._live = packed.take_over({name: view.detach() for name, view in targets.items()})
        """Views by name; on meta where `packed` alone holds the values."""
        self._metadata = {name: (dtype_name(view.dtype), tuple(view.shape)) for name, view in self._live.items()}
        self._packed = packed
        self._prepare = prepare
        self.cast_notice = CastNotice()
        self._memory = shadow_memory
        self._writer = writer
        self._shadow = Shadow(self._memory)
        self._open: StagedUpdate | None = None
        self._committed: StagedUpdate | None = None
        """The last commit, until `confirm`."""
        self._staging = threading.Lock()
        """Receivers may write several tensors at once."""
        self._known = KnownWeights()
        self._on_host = all(view.device.type in ("cpu", "meta") for view in self._live.values())
        self.num_bytes_received = 0
        """Bytes of the tensors and pieces that the last `receive` took."""
        self.pack_seconds = 0.0
        """How long the last `verify` took to lay weights out for the kernels."""
        self.version = 0
        """Policy version of the live weights."""
        self.dirty = False
        """The weights must not be used: an update ended half-way, or is under way in place, or they were released."""
        self.forgotten = False
        """They were released, and no complete update has come since."""

    def metadata(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of every accepted name, both namings."""
        return dict(self._metadata)

    @property
    def num_live_bytes(self) -> int:
        """Bytes of the live weights, tied ones once, in whatever form they are held."""
        return sum(self._live[name].nbytes for name in self._checks.canonical)

    def digest(self) -> str:
        """Total digest of the live weights under the module's own names; tied weights count once.

        Raises `LifecycleError` when they were released.
        """
        if self._open is not None and self._open.inplace:
            raise LifecycleError("digest: an update is open; commit or abort it first.")
        return total_digest(self._describe(self._checks.canonical))

    def live(self, verb: str) -> Mapping[str, Tensor]:
        """The module's own names and their live values, tied weights once; not to be written.

        Raises, naming `verb`, where values may not be live ones: `LifecycleError` while an update is open,
        `DirtyWeightsError` when `dirty`.
        """
        if self._open is not None:
            raise LifecycleError(f"{verb}: an update is open; commit or abort it first.")
        if self.dirty:
            raise DirtyWeightsError.for_verb(verb, forgotten=self.forgotten)
        return LazyTensors(self._checks.canonical, self.values)

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
        """The copies that updates and linears hold beside the live weights now."""
        yield from self._packed.copies()
        yield from self._shadow.tensors()

    def begin(
        self, manifest: WeightManifest, options: UpdateOptions = _DEFAULT_OPTIONS, *, inplace: bool = False
    ) -> bool:
        """Open a transaction; False when exactly these weights are live under this version already (nothing to do).

        `options`: `reset_version`, `allow_nonfinite` and `partial` are used here. `inplace`: without a shadow; nothing
        may be computed from the first `stage` to the commit.

        Raises `LifecycleError` when one is open, `ManifestMismatch` when names, shapes, dtypes or ties differ from the
        live weights, `StaleVersion` when the version does not move forward and `reset_version` is not set,
        `DirtyWeightsError` for a partial update of incomplete weights.
        """
        if self._open is not None:
            version = self._open.manifest.version
            raise LifecycleError(f"begin: an update to version {version} is open; commit or abort it first.")
        self._checks.check(manifest, self.metadata(), partial=options.partial)
        if options.partial and self.dirty:
            raise DirtyWeightsError.for_verb("update_weights(partial=True)", forgotten=self.forgotten)
        self._prepare()
        if self._is_live(manifest):
            return False
        if not options.reset_version:
            check_version(manifest.version, self.version, dirty=self.dirty)
        self._open = StagedUpdate(manifest, options, inplace)
        return True

    def stage(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors of the manifest into the shadow, in any order and number of calls; the last of a name counts."""
        update, batch = self._opened("stage"), WriteBatch(self._writer)
        with self._memory.beside_steps():
            try:
                for name, tensor in pairs:
                    update.check_form(name, tensor)
                    batch.write(name, self._place(update, name), tensor.detach())
            finally:
                update.staged |= batch.results()

    def receive(
        self,
        receiver: WeightReceiver,
        manifest: WeightManifest | None = None,
        *,
        check: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Stage what `receiver` brings of `manifest` (None: all of the open one), written straight into the shadow.

        `check` is called as each tensor arrives; an exception it raises ends the transfer.
        """
        update = self._opened("receive")

        def place(name: str) -> Tensor:
            check(name)
            return self._place(update, name)

        wanted = update.manifest if manifest is None else manifest
        lacking = self._lacking(update) if manifest is None and receiver.takes_part else None
        if lacking is not None:
            update.receive_only(lacking)
        with self._memory.beside_steps():
            shadow = LazyTensors(update.specs, place)
            update.staged |= receiver.receive_into(shadow, wanted, self._writer, lacking)
        self.num_bytes_received = wanted.num_bytes if lacking is None else num_bytes_lacking(lacking, update.specs)

    def verify(self) -> str:
        """Raise `ChecksumMismatch`, naming tensors, unless all arrived, unchanged and finite; then pack them.

        Returns the total digest of the staged tensors. Steps may run in another thread: nothing they read is touched.
        """
        update = self._opened("verify")
        update.check()
        start = time.perf_counter()
        if update.lacking is not None:
            parts = {name: part for name, part in update.lacking.items() if not self._packed.holds(name)}
            self._shadow.plan_some((self._live[name], storage_runs(self._live[name], parts[name])) for name in parts)
            changed = {self._live[name].untyped_storage().data_ptr() for name in parts}
            self._packed.pack_changed(self._shadow.completed, changed)
        else:
            self._packed.pack(lambda view: self._plain_place(update, view))
            written = self._checks.canonical if update.options.partial else update.specs
            self._shadow.plan([] if update.inplace else self._plain(written))
        self.pack_seconds = time.perf_counter() - start
        update.verified = True
        return update.manifest.digest

    def commit(self, version: int | None = None) -> None:
        """Make the shadow live.

        Call it where no forward is running. Raises `LifecycleError` before `verify`, or for a `version` that is not the
        open one; `DirtyWeightsError` when it fails half-way, which leaves `dirty` set.
        """
        update = self._opened("commit")
        manifest = update.manifest
        if not update.verified:
            raise LifecycleError("commit: the open update is not verified; call verify first.")
        if version not in (None, manifest.version):
            raise LifecycleError(f"commit: version {version} is not open, version {manifest.version} is.")
        self.dirty = True
        try:
            self._shadow.commit()
            self._packed.swap() if update.lacking is None else self._packed.swap_changed()
        except Exception as problem:
            raise _half_way(manifest, problem) from problem
        finally:
            self._open = None
        self._committed = update
        is_sure = not update.options.partial  # else names that overlap others may have changed these
        self._known.replace(spec for name, spec in update.specs.items() if is_sure and update.staged[name].finite)
        self.version, self.dirty, self.forgotten = manifest.version, False, False

    @contextmanager
    def versioned(self) -> Iterator[None]:
        """Count the committed version inside: committed weights under an old version would be `dirty`."""
        try:
            yield
        except BaseException:
            self.dirty = True
            raise

    def confirm(self) -> str:
        """The digest of the live weights under the names of the manifest that was committed last; after a partial
        update that of all live weights, as `digest`. Steps may go on.

        Raises `DirtyWeightsError`, and sets `dirty`, when they differ from the staged ones.
        """
        update, self._committed = self._committed, None
        if update is None:
            raise LifecycleError("confirm: no commit waits for it; call commit first.")
        try:
            written: Lacking = dict.fromkeys(update.specs) if update.lacking is None else update.lacking
            plain = {name: part for name, part in written.items() if not self._packed.holds(name)}
            specs = {spec.name: spec for spec in self._describe(name for name, part in plain.items() if part is None)}
            specs |= {name: described(part, self.values(name)) for name, part in plain.items() if part is not None}
            found = total_digest((update.specs | specs).values())
            if found != update.manifest.digest:
                raise errors.ChecksumMismatch("the live weights are not the ones that were staged")
        except Exception as problem:
            self.dirty = True
            raise _half_way(update.manifest, problem) from problem
        return self.digest() if update.options.partial else found

    def abort(self) -> None:
        """Discard the staged tensors. No-op when nothing is open. After writes in place `dirty` stays set."""
        self._open = None
        self._packed.settle()

    def release(self, *, forget: bool) -> None:
        """Free the shadow, which the next update makes again. `forget`: the live weights lose their values too."""
        assert self._open is None, "the weights of an open update are released"
        self._shadow.clear()
        self.dirty |= forget
        self.forgotten |= forget

    @property
    def is_open(self) -> bool:
        """Whether a transaction is open."""
        return self._open is not None

    @property
    def num_resident_bytes(self) -> int:
        """Bytes of `copies` that take memory now."""
        copies = list(self.copies())
        on_host = resident_bytes([copy for copy in copies if copy.device.type == "cpu"])
        return on_host + sum(copy.nbytes for copy in copies if copy.device.type != "cpu")

    @property
    def num_shadow_bytes(self) -> int:
        """Bytes that updates hold now, beside the live weights."""
        return self._shadow.num_bytes + self._packed.num_spare_bytes

    def make_room_for_shadow(self) -> bool:
        """Whether memory suffices for a shadow: counted on the host, taken as it is written; allocated on a device."""
        if self.num_bytes_to_shadow() > self._memory.num_free_bytes:
            return False
        try:
            self._reserve_shadow()
        except WeightUpdateError:
            return False
        return True

    def num_bytes_to_shadow(self) -> int:
        """Bytes that an update with a shadow would allocate."""
        return self._shadow.num_bytes_lacking(self._plain(self._live)) + self._packed.num_bytes_to_spare

    def _reserve_shadow(self) -> None:
        if not self._on_host:
            self._shadow.reserve(self._plain(self._live))

    def _opened(self, verb: str) -> StagedUpdate:
        if self._open is None:
            raise LifecycleError(f"{verb}: no update is open; call begin first.")
        return self._open

    def _place(self, update: StagedUpdate, name: str) -> Tensor:
        """Memory for the next values of a name. Values that were staged for it before no longer count."""
        with self._staging:
            update.verified = False
            update.staged.pop(name, None)
            if not update.started:
                self._start(update)
            if self._packed.holds(name):
                return self._packed.staging(name)
            return self._plain_place(update, self._live[name])

    def _start(self, update: StagedUpdate) -> None:
        """Prepare for the first write: in place, give up the old values; if partial, stage all values as they are."""
        if update.inplace:
            self.dirty = True
            self._shadow.clear()
            self._packed.surrender()
        else:
            self._reserve_shadow()
        if update.lacking is not None:
            self._packed.carry_changed({name: part and part.elements for name, part in update.lacking.items()})
        if update.options.partial:
            self._packed.carry()
            for view in [] if update.inplace else self._plain(self._checks.canonical):
                self._shadow.of(view).copy_(view)
        update.started = True

    def _lacking(self, update: StagedUpdate) -> Lacking | None:
        """Return the pieces that the update has to bring, where it may leave the rest as it is; None: all."""
        if not update.options.delta or update.options.partial or update.inplace or update.started or self.dirty:
            return None
        if not self._on_host or self._packed.is_without_values:
            return None
        return self._known.lacking(update.specs, self._takes_pieces)

    def _takes_pieces(self, name: str) -> bool:
        """Whether parts of these values can be replaced."""
        return self._packed.takes_pieces(name) if self._packed.holds(name) else self._live[name].is_contiguous()

    def _plain_place(self, update: StagedUpdate, view: Tensor) -> Tensor:
        return view if update.inplace else self._shadow.of(view)

    def _plain(self, names: Iterable[str]) -> list[Tensor]:
        """The live views of those names that steps read in place."""
        return [self._live[name] for name in names if not self._packed.holds(name)]

    def _describe(self, names: Iterable[str]) -> list[TensorSpec]:
        """Specs, with digests, of live values; steps may go on."""
        with self._memory.beside_steps():
            return describe_all((name, self.values(name)) for name in names)

    def _is_live(self, manifest: WeightManifest) -> bool:
        if self.dirty or manifest.version != self.version:
            return False
        return total_digest(self._describe(spec.name for spec in manifest.tensors)) == manifest.digest


def _half_way(manifest: WeightManifest, problem: Exception) -> DirtyWeightsError:
    what = f"The commit of version {manifest.version} failed: {problem}"
    return DirtyWeightsError(f"{what}. Live weights may be a mixture: send them again.")
