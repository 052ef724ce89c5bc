"""An open update: its manifest and options, and the tensors that have arrived."""

from torch import Tensor

from rollout_engine.base.messages import UpdateOptions
from sync import errors
from sync.manifest import WeightManifest, counted, dtype_name, first_names
from sync.pieces import Lacking
from sync.tensor_check import CheckResult


class StagedUpdate:
    """Manifest and options of an open update, and the check results of the tensors staged so far."""

    def __init__(self, manifest: WeightManifest, options: UpdateOptions, inplace: bool) -> None:
        self.manifest, self.options, self.inplace = manifest, options, inplace
        self.specs = {spec.name: spec for spec in manifest.tensors}
        self.staged: dict[str, CheckResult] = {}
        """Digest and finiteness of the tensor written last, by name."""
        self.lacking: Lacking | None = None
        """Pieces that are received, if the rest is live already; None: all."""
        self.elements: dict[str, Tensor] = {}
        """Some elements of the tensors, by name, for the next update to be compared with."""
        self.started = self.verified = False
        """Whether the first write was prepared; whether all was verified since the last."""

    def receive_only(self, lacking: Lacking) -> None:
        """Take all other tensors as staged: they are live, with the digest of the manifest and finite."""
        self.lacking = lacking
        self.staged = {name: CheckResult(spec.digest, True) for name, spec in self.specs.items() if name not in lacking}

    def check_arrived(self) -> None:
        """Raise `ChecksumMismatch` unless every tensor arrived, unchanged and finite."""
        if absent := [name for name in self.specs if name not in self.staged]:
            what = counted(absent, "tensor", "tensors")
            raise errors.ChecksumMismatch(f"{what} of the manifest never arrived: {first_names(absent)}.")
        for name, spec in self.specs.items():
            arrived = self.staged[name]
            if arrived.digest != spec.digest:
                raise errors.ChecksumMismatch(f"'{name}' changed on the way: its digest is not the manifest's.")
            if not self.options.allow_nonfinite and not arrived.finite:
                raise errors.ChecksumMismatch(f"'{name}' has values that are NaN or infinite: check the last loss.")

    def check_form(self, name: str, tensor: Tensor) -> None:
        """Raise `ManifestMismatch` unless the manifest announces the tensor, in its dtype and shape."""
        spec = self.specs.get(name)
        if spec is None:
            raise errors.ManifestMismatch(f"'{name}' is not in the manifest of the open update.")
        came = (dtype_name(tensor.dtype), tuple(tensor.shape))
        if came != (spec.dtype, spec.shape):
            raise errors.ManifestMismatch(f"'{name}' came as {came}; the manifest says {(spec.dtype, spec.shape)}.")
