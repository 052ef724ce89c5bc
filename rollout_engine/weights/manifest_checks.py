"""Checks that the manifest of an update describes the engine's weights: names, ties, shapes, dtypes."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from rollout_engine.weights.coverage import Coverage
from sync.base import Metadata
from sync.checkpoint_names import CheckpointNames
from sync.errors import ManifestMismatch, StaleVersion
from sync.manifest import TensorSpec, WeightManifest, check_forms, check_known, counted, first_names


class ManifestChecks:
    """Compares manifests with the weights of one engine.

    Args:
        targets: every accepted name, the module's and the checkpoint's, as a view of live storage.
        aliases: groups of names that are one and the same view (tied weights).
        names: the further names that a source may have.
    """

    def __init__(
        self,
        targets: Mapping[str, Tensor],
        aliases: Iterable[Iterable[str]],
        names: CheckpointNames = CheckpointNames(),  # noqa: B008 (it is frozen)
    ) -> None:
        self.names = names
        self._same_as = {name: group[0] for group in map(list, aliases) for name in group}
        self._coverage = Coverage(targets)
        self.canonical = self._coverage.canonical
        """Names that together are every weight once, in order."""

    def missing(self, names: Iterable[str], live: Metadata) -> list[str]:
        """Names that, with these of a source, are every weight; none for a source that a whole update may have."""
        used = self.names.used(((name, None) for name in names), live)
        return self._coverage.missing({self._owner(name) for name, _ in used if name in live})

    def check_manifest(self, manifest: WeightManifest, live: Metadata, *, partial: bool) -> None:
        """Raise `ManifestMismatch` unless the manifest sends every weight once, in the form of `live`.

        `partial`: it may leave weights out, but has to send some.
        """
        manifest.check()
        self._check_names(manifest, live, partial=partial)
        check_forms(((spec.name, (spec.dtype, spec.shape)) for spec in manifest.tensors), live)

    def _check_names(self, manifest: WeightManifest, live: Metadata, *, partial: bool) -> None:
        names = [spec.name for spec in manifest.tensors]
        check_known([*names, *(name for group in manifest.aliases for name in group)], live)
        self._check_ties(manifest)
        chosen = {self._owner(name) for name in names}
        if twice := self._coverage.overlapping(chosen):
            what = counted(twice, "name overlaps", "names overlap")
            raise ManifestMismatch(f"{what} others of the manifest: {first_names(twice)}.")
        if partial and not names:
            raise ManifestMismatch("partial=True, and the update has no tensor: send at least one.")
        if not partial and (missing := self._coverage.missing(chosen)):
            advice = "Send every weight, or only some with partial=True, which leaves the others as they are."
            what = counted(missing, "tensor is", "tensors are")
            raise ManifestMismatch(f"{what} missing: {first_names(missing)}. {advice}")

    def _check_ties(self, manifest: WeightManifest) -> None:
        """Ties at the source must be ties here; names tied here may all be sent if they carry the same values."""
        for first, *others in manifest.aliases:
            if apart := [name for name in others if self._owner(name) != self._owner(first)]:
                what = f"tied to '{first}' at the source, but not in the engine"
                raise ManifestMismatch(f"{first_names(apart)}: {what}.")
        sent: dict[str, TensorSpec] = {}
        for spec in manifest.tensors:
            other = sent.setdefault(self._owner(spec.name), spec)
            if other.digest != spec.digest:
                what = "are tied in the engine, but differ at the source (adapters on one of the two do that)"
                fix = "Send equal values, or load the engine from a checkpoint with tie_word_embeddings=False"
                raise ManifestMismatch(f"'{other.name}' and '{spec.name}' {what}. {fix}.")

    def _owner(self, name: str) -> str:
        return self._same_as.get(name, name)


def check_version(version: int, live: int, *, dirty: bool) -> None:
    """Raise `StaleVersion` unless `version` may follow the live one; the same one may replace `dirty` weights."""
    if version > live or (dirty and version == live):
        return
    what = "is live with other weights" if version == live else f"is older than the live version {live}"
    advice = "Send a higher one, or reset_version=True if the trainer restarted."
    raise StaleVersion(f"Version {version} {what}. {advice}")
