"""A weight update is a transaction on the live model: all of it, or nothing.

    begin(manifest) ──> stage(pairs) ... ──> verify() ──> commit(version)
       refuse: nothing changed   into the shadow   complete,   live := shadow, version := v
                                                   digests,
                                                   finite,     confirm(): the digest of the live ones
                                                   packed      abort() before commit: the shadow is forgotten

Until the first byte of `commit`, neither the version nor the weights that steps use change, whatever goes wrong. If
`commit` itself fails, `dirty` stays set and only a complete update clears it.

Steps wait for `commit` alone. `confirm` runs during the steps that follow: it reads the live weights again and returns
their digest.

An update in place has no shadow: the first staged byte sets `dirty`, and the old values are lost.
"""

import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import Tensor
from transformers import PretrainedConfig

from rollout_engine.base.errors import DirtyWeightsError, LifecycleError
from rollout_engine.base.messages import UpdateOptions
from rollout_engine.model.backend import ShadowMemory
from rollout_engine.model.packing.packed_weights import PackedWeights
from rollout_engine.weights.changed_share import ChangedShare
from rollout_engine.weights.held_weights import HeldWeights, WeightHolder
from rollout_engine.weights.known_weights import KnownWeights
from rollout_engine.weights.lazy_tensors import LazyTensors
from rollout_engine.weights.live_digest import LiveDigest
from rollout_engine.weights.manifest_checks import ManifestChecks, check_version
from rollout_engine.weights.staged_update import StagedUpdate
from sync import errors
from sync.base import WeightReceiver
from sync.cast_notice import CastNotice
from sync.checkpoint_names import CheckpointNames
from sync.manifest import WeightManifest, total_digest
from sync.pieces import Lacking, described, num_bytes_lacking
from sync.tensor_writer import HOST_WRITER, TensorWriter, WriteBatch

_DEFAULT_OPTIONS = UpdateOptions()


class WeightUpdater:
    """The live weights of one engine, and the one transaction that may be open on them.

    Args:
        weights: holds them and their next values.
        checks: compares manifests with them.
        writer: writes arriving tensors to their staging memory.
        changes: estimates how much updates change; None: nothing does.
        config: the configuration of the model, which that of a checkpoint must match; None: they are not compared.
    """

    def __init__(
        self,
        weights: WeightHolder,
        checks: ManifestChecks,
        writer: TensorWriter = HOST_WRITER,
        changes: ChangedShare | None = None,
        config: PretrainedConfig | None = None,
    ) -> None:
        self.weights = weights
        self._checks, self._writer = checks, writer
        self.config = config
        self.cast_notice = CastNotice()
        self._open: StagedUpdate | None = None
        self._committed: StagedUpdate | None = None
        """The last commit, until `confirm`."""
        self._staging = threading.Lock()
        """Receivers may write several tensors at once."""
        self._known = KnownWeights()
        self._changes = changes
        self.changed_share: float | None = None
        """Share of the weights' elements that the last `verify` found changed, as an estimate; None: not known."""
        self.num_bytes_received = 0
        """Bytes of the tensors and pieces that the last `receive` took."""
        self.pack_seconds = 0.0
        """How long the last `verify` took to lay weights out for the kernels."""
        self.version = 0
        """Policy version of the live weights."""
        self.dirty = False
        """The weights must not be used: an update ended half-way, or is under way in place, or they were released."""
        self.forgotten = False
        """They were released, and no complete update has followed."""
        self.live_digest = LiveDigest(self.digest, checks.canonical)

    @classmethod
    def of(
        cls,
        targets: Mapping[str, Tensor],
        aliases: Iterable[Iterable[str]],
        packed: PackedWeights,
        shadow_memory: ShadowMemory,
        names: CheckpointNames = CheckpointNames(),  # noqa: B008 (it is frozen)
        *,
        prepare: Callable[[], object] = lambda: None,
        committed: Callable[[], object] = lambda: None,
        writer: TensorWriter = HOST_WRITER,
        config: PretrainedConfig | None = None,
    ) -> "WeightUpdater":
        """The updater of weights in this process, which `HeldWeights` holds; `targets` and `aliases` name them all.

        `names`: as of `ManifestChecks`; `prepare`, `committed`: as of `HeldWeights`; `config`: as of `WeightUpdater`.
        """
        checks = ManifestChecks(targets, aliases, names)
        on_host = all(view.device.type == "cpu" for view in targets.values())
        changes = ChangedShare({name: targets[name] for name in checks.canonical}) if on_host else None
        return cls(HeldWeights(targets, packed, shadow_memory, prepare, committed), checks, writer, changes, config)

    def metadata(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of every accepted name, both namings."""
        return dict(self.weights.metadata)

    @property
    def names(self) -> CheckpointNames:
        """The further names that a source may have."""
        return self._checks.names

    def missing(self, names: Iterable[str]) -> list[str]:
        """Names that, with these of a source, are every weight; none once a whole update may be made of them."""
        return self._checks.missing(names, self.weights.metadata)

    def list_unused(self, names: Iterable[str]) -> list[str]:
        """Those of a source's names that checkpoints of the model may have, and the model does not use."""
        given = list(names)
        used = {name for _, name in self.names.used(((name, name) for name in given), self.weights.metadata)}
        return [name for name in given if name not in used]

    def own_names(self, names: Iterable[str]) -> list[str]:
        """The model's names of the weights that checkpoints call `names`; names of nothing as they are."""
        return [self.names.own(name, self.weights.metadata) for name in names]

    @property
    def num_live_bytes(self) -> int:
        """Bytes of the live weights, tied ones once, in whatever form they are held."""
        return self.weights.num_bytes(self._checks.canonical)

    def digest(self, without: Container[str] = ()) -> str:
        """Total digest of the live weights under the module's own names, `without` some; tied weights count once.

        Raises `LifecycleError` when they were released.
        """
        if self._open is not None and self._open.inplace:
            raise LifecycleError("digest: an update is open; commit or abort it first.")
        return total_digest(self.weights.describe(name for name in self._checks.canonical if name not in without))

    def live(self, verb: str) -> Mapping[str, Tensor]:
        """The module's own names and their live values, tied weights once; not to be written.

        Raises, naming `verb`, if values may not be live ones: `LifecycleError` while an update is open,
        `DirtyWeightsError` when `dirty`.
        """
        if self._open is not None:
            raise LifecycleError(f"{verb}: an update is open; commit or abort it first.")
        if self.dirty:
            raise DirtyWeightsError.for_verb(verb, forgotten=self.forgotten)
        return LazyTensors(self._checks.canonical, self.values)

    def values(self, name: str) -> Tensor:
        """The live values of a name, to be read only: a view if steps read them, else a copy.

        Raises `LifecycleError` when they were released.
        """
        return self.weights.values(name)

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
        self._checks.check_manifest(manifest, self.metadata(), partial=options.partial)
        if options.partial and self.dirty:
            raise DirtyWeightsError.for_verb("update_weights(partial=True)", forgotten=self.forgotten)
        self.weights.prepare_weights()
        if self._is_live(manifest):
            return False
        if not options.reset_version:
            check_version(manifest.version, self.version, dirty=self.dirty)
        self._open = StagedUpdate(manifest, options, inplace)
        return True

    def stage(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors of the manifest into the shadow, in any order and number of calls; the last of a name counts."""
        update, batch = self._require_open("stage"), WriteBatch(self._writer)
        with self.weights.beside_steps():
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
        """Stage the tensors of `manifest` from `receiver` (None: all of the open one), written right into the shadow.

        `check` is called as each tensor arrives; an exception it raises ends the transfer.
        """
        update = self._require_open("receive")

        def place(name: str) -> Tensor:
            check(name)
            return self._place(update, name)

        wanted = update.manifest if manifest is None else manifest
        lacking = self._lacking(update) if manifest is None and receiver.takes_part else None
        if lacking is not None:
            update.receive_only(lacking)
        with self.weights.beside_steps():
            shadow = LazyTensors(update.specs, place)
            update.staged |= receiver.receive_into(shadow, wanted, self._writer, lacking)
        self.num_bytes_received = wanted.num_bytes if lacking is None else num_bytes_lacking(lacking, update.specs)

    def verify(self) -> str:
        """Raise `ChecksumMismatch`, naming tensors, unless all arrived, unchanged and finite; then pack them.

        Returns the total digest of the staged tensors. Steps may run in another thread: nothing they read is touched.
        """
        update = self._require_open("verify")
        update.check_arrived()
        self._measure_change(update)
        start = time.perf_counter()
        names = self._checks.canonical if update.options.partial else update.specs
        self.weights.pack(inplace=update.inplace, lacking=update.lacking, names=names)
        self.pack_seconds = time.perf_counter() - start
        update.verified = True
        return update.manifest.digest

    def commit(self, version: int | None = None) -> None:
        """Make the shadow live.

        Call it while no forward is running. Raises `LifecycleError` before `verify`, or for a `version` that is not the
        open one; `DirtyWeightsError` when it fails half-way, which leaves `dirty` set.
        """
        update = self._require_open("commit")
        manifest = update.manifest
        if not update.verified:
            raise LifecycleError("commit: the open update is not verified; call verify first.")
        if version not in (None, manifest.version):
            raise LifecycleError(f"commit: version {version} is not open, version {manifest.version} is.")
        self.dirty = True
        self.live_digest.forget()
        try:
            self.weights.commit(lacking=update.lacking)
        except Exception as problem:
            raise _half_way(manifest, problem) from problem
        finally:
            self._open = None
        self._committed = update
        is_sure = not update.options.partial  # else names that overlap others may have changed these
        if self._changes is not None:
            self._changes.keep(update.elements)
        self._known.replace(spec for name, spec in update.specs.items() if is_sure and update.staged[name].finite)
        self.version, self.dirty, self.forgotten = manifest.version, False, False

    @contextmanager
    def count_version(self) -> Iterator[None]:
        """Count the committed version inside: committed weights under an old version would be `dirty`."""
        try:
            yield
        except BaseException:
            self.dirty = True
            raise

    def confirm(self) -> str:
        """The digest of the live weights under the names of the manifest that was committed last; after a partial
        update that of all live weights, as `digest`. Steps may continue.

        Raises `DirtyWeightsError`, and sets `dirty`, when they differ from the staged ones.
        """
        update, self._committed = self._committed, None
        if update is None:
            raise LifecycleError("confirm: no commit waits for it; call commit first.")
        try:
            written: Lacking = dict.fromkeys(update.specs) if update.lacking is None else update.lacking
            plain = {name: part for name, part in written.items() if not self.weights.is_packed(name)}
            as_wholes = [name for name, part in plain.items() if part is None]
            specs = {spec.name: spec for spec in self.weights.describe(as_wholes)}
            specs |= {name: described(part, self.values(name)) for name, part in plain.items() if part is not None}
            found = total_digest((update.specs | specs).values())
            if found != update.manifest.digest:
                raise errors.ChecksumMismatch("the live weights are not the ones that were staged")
        except Exception as problem:
            self.dirty = True
            raise _half_way(update.manifest, problem) from problem
        self.live_digest.confirm({} if update.options.partial else update.specs | specs)
        return self.live_digest.value or self.digest() if update.options.partial else found

    def abort(self) -> None:
        """Discard the staged tensors. No-op when nothing is open. After writes in place `dirty` stays set."""
        self._open = None
        self.weights.settle()

    def release(self, *, forget: bool) -> None:
        """Free the shadow, which the next update makes again. `forget`: the live weights lose their values too."""
        assert self._open is None, "the weights of an open update are released"
        self.weights.release()
        self.dirty |= forget
        if forget:
            self.live_digest.forget()
        self.forgotten |= forget
        if forget and self._changes is not None:
            self._changes.forget()

    @property
    def is_open(self) -> bool:
        """Whether a transaction is open."""
        return self._open is not None

    @property
    def num_resident_bytes(self) -> int:
        """Bytes that copies of the live weights, of updates and of linears, take now."""
        return self.weights.num_resident_bytes

    @property
    def num_shadow_bytes(self) -> int:
        """Bytes that updates hold now, in addition to the live weights."""
        return self.weights.num_shadow_bytes

    def make_room_for_shadow(self) -> bool:
        """Whether memory suffices for a shadow: counted on the host, taken as it is written; allocated on a device."""
        return self.weights.make_room_for_shadow()

    def num_bytes_to_shadow(self) -> int:
        """Bytes that an update with a shadow would allocate."""
        return self.weights.num_bytes_to_shadow()

    def _require_open(self, verb: str) -> StagedUpdate:
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
            return self.weights.place(name, inplace=update.inplace)

    def _start(self, update: StagedUpdate) -> None:
        """Prepare for the first write: in place, give up the old values; if partial, stage all values as they are."""
        if update.inplace:
            self.dirty = True
        carried = self._checks.canonical if update.options.partial else None
        self.weights.start(inplace=update.inplace, lacking=update.lacking, carried=carried)
        update.started = True

    def _measure_change(self, update: StagedUpdate) -> None:
        """Compare some staged elements, while they are plain, with those of the live weights."""
        if self._changes is not None:
            staged = partial(self.weights.place, inplace=update.inplace)
            self.changed_share, update.elements = self._changes.measure(update.specs.values(), update.lacking, staged)

    def _lacking(self, update: StagedUpdate) -> Lacking | None:
        """Return the pieces that the update has to send, if the rest may stay; None: all."""
        if not update.options.delta or update.options.partial or update.inplace or update.started or self.dirty:
            return None
        return self._known.lacking(update.specs, self.weights.takes_pieces) if self.weights.takes_parts else None

    def _is_live(self, manifest: WeightManifest) -> bool:
        if self.dirty or manifest.version != self.version:
            return False
        return total_digest(self.weights.describe(spec.name for spec in manifest.tensors)) == manifest.digest


def _half_way(manifest: WeightManifest, problem: Exception) -> DirtyWeightsError:
    what = f"The commit of version {manifest.version} failed: {problem}"
    return DirtyWeightsError(f"{what}. Live weights may be a mixture: send them again.")
