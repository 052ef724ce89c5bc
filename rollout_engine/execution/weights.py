"""A weight update is a transaction on the live model: all of it, or nothing.

    begin(manifest) ──> stage(name, tensor) ... ──> verify() ──> commit()
       refuse: nothing changed      into the shadow   complete,     live := shadow, version := v
                                                      digests,
                                                      finite,
                                                      packed        abort() at any point before: the shadow is forgotten

Until the first byte of `commit`, what steps compute with and the version are untouched whatever goes wrong. Should
`commit` itself fail, `dirty` stays set and only a complete update clears it.

The shadow of a weight that steps read where it lies is a second plain copy; that of a linear which runs from a packed
copy is its own plain storage, since only packing reads it. `verify` packs, beside the copies in use; `commit` copies
the few plain weights and puts the new packed copies in place of the old, which the next update packs over. So from the
first update on a linear is held three times: plain, packed, and packed for the next.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

import msgspec
import torch
from torch import Tensor, UntypedStorage

from rollout_engine.errors import DirtyWeightsError, LifecycleError, as_weight_errors
from rollout_engine.execution.coverage import Coverage
from rollout_engine.model.packed_weights import PackedWeights
from rollout_engine.outputs import UpdateReport
from sync import errors
from sync.base import WeightSource
from sync.manifest import TensorSpec, WeightManifest, describe, dtype_name, first_names, total_digest
from sync.transports import make_receiver, make_sender


class WeightUpdater:
    """The live weights of one worker, and the one transaction that may be open on them.

    Args:
        targets: every accepted name, the module's and the checkpoint's, as a view of live storage.
        aliases: groups of names that are one and the same view (tied weights).
        packed: the copies that linears run from.
        version: policy version of the weights that are live now.
    """

    def __init__(
        self,
        targets: Mapping[str, Tensor],
        aliases: Iterable[Iterable[str]],
        packed: PackedWeights,
        *,
        version: int = 0,
    ) -> None:
        self._live = {name: view.detach() for name, view in targets.items()}
        self._same_as = {name: group[0] for group in map(list, aliases) for name in group}
        self._coverage = Coverage(self._live)
        self._packed = packed
        self._shadow: dict[int, UntypedStorage] = {}
        """By the address of the live storage."""
        self._overwritten = False
        """Plain weights that no step reads hold staged values."""
        self._open: WeightManifest | None = None
        self._staged: set[str] = set()
        self._verified = False
        self.version = version
        self.dirty = False
        """The weights must not be used: a commit failed half-way, or they were released."""

    def metadata(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of every accepted name, both namings."""
        return {name: (dtype_name(view.dtype), tuple(view.shape)) for name, view in self._live.items()}

    def digest(self) -> str:
        """xxh3-128 of the live weights under the module's own names; tied weights count once.

        Raises `LifecycleError` while an update is being staged.
        """
        if self._overwritten:
            raise LifecycleError("digest: an update is open; commit or abort it first.")
        return self._live_digest(self._coverage.canonical())

    def begin(self, manifest: WeightManifest, *, reset_version: bool = False) -> bool:
        """Open a transaction; False when exactly these weights are live under this version already (nothing to do).

        Raises `LifecycleError` when one is open, `ManifestMismatch` when names, shapes, dtypes or ties differ from the
        live weights, `StaleVersion` when the version does not move forward and `reset_version` is not set.
        """
        if self._open is not None:
            raise LifecycleError(f"begin: an update to version {self._open.version} is open; commit or abort it first.")
        manifest.check()
        self._check_names(manifest)
        self._check_forms(manifest)
        if self._is_live(manifest):
            return False
        self._check_version(manifest.version, reset_version)
        self._open, self._staged, self._verified = manifest, set(), False
        return True

    def stage(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor of the manifest into the shadow. A name staged twice keeps the later values."""
        spec = self._specs("stage").get(name)
        if spec is None:
            raise errors.ManifestMismatch(f"'{name}' is not in the manifest of the open update.")
        came = (dtype_name(tensor.dtype), tuple(tensor.shape))
        if came != (spec.dtype, spec.shape):
            raise errors.ManifestMismatch(f"'{name}' came as {came}; the manifest says {(spec.dtype, spec.shape)}.")
        self._verified = False
        self._overwritten |= not self._packed.reads(self._live[name])
        self._shadow_of(self._live[name]).copy_(tensor.detach())
        self._staged.add(name)

    def verify(self) -> None:
        """Raise `ChecksumMismatch`, naming tensors, unless all arrived, unchanged and finite; then pack them.

        Nothing that a step reads is touched, so steps may go on in another thread.
        """
        specs = self._specs("verify")
        if absent := [name for name in specs if name not in self._staged]:
            raise errors.ChecksumMismatch(
                f"{len(absent)} tensors of the manifest never arrived: {first_names(absent)}."
            )
        for name, spec in specs.items():
            arrived = self._shadow_of(self._live[name])
            if describe(name, arrived) != spec:
                raise errors.ChecksumMismatch(f"'{name}' changed on the way: its digest is not the manifest's.")
            if not _is_finite(arrived):
                raise errors.ChecksumMismatch(f"'{name}' has values that are NaN or infinite.")
        self._packed.pack(self._shadow_of)
        self._verified = True

    def commit(self) -> str:
        """Make the shadow live and return the digest of the live weights under the manifest's names.

        Call it where no forward is running. Raises `LifecycleError` before `verify`; `DirtyWeightsError` when it fails
        half-way, which leaves `dirty` set.
        """
        manifest, specs = self._open, self._specs("commit")
        if manifest is None or not self._verified:
            raise LifecycleError("commit: the open update is not verified; call verify first.")
        self.dirty, self._overwritten = True, False
        try:
            copied = {name: self._live[name] for name in specs if self._packed.reads(self._live[name])}
            for view in copied.values():
                view.copy_(self._shadow_of(view))
            self._packed.swap()
            digest = total_digest(describe(n, copied[n]) if n in copied else spec for n, spec in specs.items())
            if digest != manifest.digest:
                raise errors.ChecksumMismatch("the live weights are not the ones that were staged")
        except Exception as problem:
            what = f"The commit of version {manifest.version} failed: {problem}"
            raise DirtyWeightsError(f"{what}. Live weights may be a mixture: send them again.") from problem
        finally:
            self._open = None
        self.version, self.dirty = manifest.version, False
        return digest

    def abort(self) -> None:
        """Forget what was staged. No-op when nothing is open."""
        self._open, self._staged, self._verified = None, set(), False
        if self._overwritten:
            self._packed.restore()
            self._overwritten = False

    def release(self, *, forget: bool) -> None:
        """Free the shadow, which the next update makes again. `forget`: the live weights lose their values too."""
        assert self._open is None, "the weights of an open update are released"
        self._shadow.clear()
        self.dirty |= forget

    def _specs(self, verb: str) -> dict[str, TensorSpec]:
        if self._open is None:
            raise LifecycleError(f"{verb}: no update is open; call begin first.")
        return {spec.name: spec for spec in self._open.tensors}

    def _shadow_of(self, view: Tensor) -> Tensor:
        """Where the next values of a live view are gathered; allocated once and used again by later updates."""
        if not self._packed.reads(view):
            return view
        live = view.untyped_storage()
        if live.data_ptr() not in self._shadow:
            self._shadow[live.data_ptr()] = UntypedStorage(live.nbytes())
        storage = self._shadow[live.data_ptr()]
        return torch.empty(0, dtype=view.dtype).set_(storage, view.storage_offset(), view.shape, view.stride())

    def _live_digest(self, names: Iterable[str]) -> str:
        return total_digest(describe(name, self._live[name]) for name in names)

    def _check_names(self, manifest: WeightManifest) -> None:
        names = [spec.name for spec in manifest.tensors]
        mentioned = names + [name for group in manifest.aliases for name in group]
        if unknown := sorted({name for name in mentioned if name not in self._live}):
            raise errors.ManifestMismatch(f"{len(unknown)} names are not in the model: {first_names(unknown)}.")
        self._check_ties(manifest)
        chosen = {self._owner(name) for name in names}
        if twice := self._coverage.overlapping(chosen):
            raise errors.ManifestMismatch(f"{len(twice)} names overlap others of the manifest: {first_names(twice)}.")
        if missing := self._coverage.missing(chosen):
            raise errors.ManifestMismatch(f"{len(missing)} tensors are missing: {first_names(missing)}.")

    def _check_ties(self, manifest: WeightManifest) -> None:
        """Ties at the source must be ties here; names tied here may all be sent if they carry the same values."""
        for first, *others in manifest.aliases:
            if apart := [name for name in others if self._owner(name) != self._owner(first)]:
                what = f"tied to '{first}' at the source, but not in the engine"
                raise errors.ManifestMismatch(f"{first_names(apart)}: {what}.")
        sent: dict[str, TensorSpec] = {}
        for spec in manifest.tensors:
            other = sent.setdefault(self._owner(spec.name), spec)
            if other.digest != spec.digest:
                what = "are tied in the engine, but differ at the source"
                raise errors.ManifestMismatch(f"'{other.name}' and '{spec.name}' {what}.")

    def _check_forms(self, manifest: WeightManifest) -> None:
        live = self.metadata()
        wrong = [
            f"'{spec.name}': expected {live[spec.name]}, came {(spec.dtype, spec.shape)}"
            for spec in manifest.tensors
            if (spec.dtype, spec.shape) != live[spec.name]
        ]
        if wrong:
            hint = "Shapes must be equal; only floating dtypes are cast."
            raise errors.ManifestMismatch(f"{len(wrong)} tensors do not fit: {first_names(wrong)}. {hint}")

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

    def _owner(self, name: str) -> str:
        return self._same_as.get(name, name)


def update_from_source(
    updater: WeightUpdater,
    source: WeightSource,
    *,
    version: int | None = None,
    reset_version: bool = False,
    boundary: AbstractContextManager[object],
    advance: Callable[[int], int],
) -> UpdateReport:
    """One whole update from a source in this process: begin, stage, verify, commit; or an error and nothing changed.

    `version=None` is the live version + 1. The commit runs inside `boundary`, which keeps steps out; there
    `advance(version)` tells the core and returns the number of requests in flight. Raises the weight errors of
    `rollout_engine.errors`.
    """
    start = time.perf_counter()
    sender = make_sender("inproc")
    try:
        with as_weight_errors():
            manifest = sender.offer(source, updater.version + 1 if version is None else version, updater.metadata())
        tensors = make_receiver("inproc", sender=sender).receive(manifest)
        report = apply_update(
            updater, manifest, tensors, reset_version=reset_version, boundary=boundary, advance=advance
        )
    finally:
        sender.close()
    return msgspec.structs.replace(report, seconds=time.perf_counter() - start)


def apply_update(
    updater: WeightUpdater,
    manifest: WeightManifest,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    reset_version: bool,
    boundary: AbstractContextManager[object],
    advance: Callable[[int], int],
) -> UpdateReport:
    """As `update_from_source`, of tensors on their way; none is asked for before the manifest is accepted."""
    start = time.perf_counter()
    with as_weight_errors():
        if not updater.begin(manifest, reset_version=reset_version):
            return UpdateReport(manifest.version, manifest.digest, 0, 0, time.perf_counter() - start, 0.0, 0)
        try:
            for name, tensor in tensors:
                updater.stage(name, tensor)
            updater.verify()
            with boundary:
                stalled = time.perf_counter()
                digest = updater.commit()
                num_in_flight = advance(manifest.version)
                end = time.perf_counter()
        finally:
            updater.abort()
    return UpdateReport(
        manifest.version, digest, len(manifest.tensors), manifest.num_bytes, end - start, end - stalled, num_in_flight
    )


def _is_finite(tensor: Tensor) -> bool:
    """By the extremes alone: both pass NaN on, and an infinity is one of them."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)
    return bool(low.isfinite() and high.isfinite())
