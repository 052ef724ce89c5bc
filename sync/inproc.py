"""The in-process transport: trainer and engine share one address space, nothing is serialised.

The sender holds on to the trainer's own tensors; the receiver reads them one at a time, casting on the way. A tensor
that changes between `offer` and `receive` no longer has the digest in the manifest, and the update is refused.
"""

from collections.abc import Iterator

from torch import Tensor

from sync.base import Metadata, WeightSource
from sync.manifest import WeightManifest, describe
from sync.source import NamedTensor, cast_for, read_source, tied_groups


class InprocSender:
    """Offers a source to receivers in the same process."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._metadata: Metadata = {}

    def offer(self, source: WeightSource, version: int, metadata: Metadata) -> WeightManifest:
        """As `WeightSender.offer`. Holds references to the source's tensors, not copies, until `close`."""
        tensors = read_source(source)
        groups = tied_groups(tensors)
        repeated = {name for group in groups for name in group[1:]}
        sent = [(name, tensor) for name, tensor in tensors if name not in repeated]
        specs = [describe(name, cast_for(name, tensor, metadata)) for name, tensor in sent]
        self._tensors, self._metadata = dict(sent), metadata
        return WeightManifest.of(version, specs, groups)

    def read(self, name: str) -> Tensor:
        """The offered tensor in the receiver's dtype."""
        return cast_for(name, self._tensors[name], self._metadata)

    def close(self) -> None:
        """Drop the references to the source."""
        self._tensors = {}


class InprocReceiver:
    """Reads what an `InprocSender` offers."""

    def __init__(self, sender: InprocSender) -> None:
        self._sender = sender

    def receive(self, manifest: WeightManifest) -> Iterator[NamedTensor]:
        """As `WeightReceiver.receive`, in manifest order."""
        for spec in manifest.tensors:
            yield spec.name, self._sender.read(spec.name)

    def close(self) -> None:
        """Nothing to let go of: the sender owns the references."""
