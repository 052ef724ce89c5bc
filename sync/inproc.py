"""The in-process transport: trainer and engine share one address space, nothing is serialised.

The sender holds on to the trainer's own tensors; the receiver reads them one at a time, casting on the way, each where
it lies: what is on the engine's device stays there. A tensor that changes between `offer` and `receive` no longer has
the digest in the manifest, and the update is refused.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor

from sync.arrival import Arrivals
from sync.base import Metadata, WeightReceiver, WeightSource
from sync.errors import SyncError
from sync.looks import Arrival
from sync.manifest import WeightManifest
from sync.offer import Offer
from sync.source import NamedTensor


class InprocSender:
    """Offers a source to receivers in the same process."""

    def __init__(self) -> None:
        self._offer: Offer | None = None
        self.manifest: WeightManifest | None = None
        """Of what is on offer now."""

    def offer(self, source: WeightSource, version: int, metadata: Metadata) -> WeightManifest:
        """As `WeightSender.offer`. Holds references to the source's tensors, not copies, until `close`."""
        offer = Offer(source, metadata)
        self.manifest = offer.manifest_in_place(version)
        self._offer = offer
        return self.manifest

    def send(self) -> None:
        """Nothing to move: receivers read for themselves."""

    def on_offer(self, manifest: WeightManifest) -> Offer:
        """The offered tensors, in the receiver's dtypes, where the source has them.

        `SyncError` after `close`, and where it is not what `manifest` describes.
        """
        if self._offer is None or self.manifest is None or self.manifest.digest != manifest.digest:
            raise SyncError(f"Version {manifest.version} is not, or no longer, on offer.")
        return self._offer

    def read(self, name: str) -> Tensor:
        """The offered tensor in the receiver's dtype, where the source has it. `SyncError` after `close`."""
        if self._offer is None:
            raise SyncError("Nothing is on offer: the sender is closed, or has offered nothing yet.")
        return self._offer.cast(self._offer.index[name])

    def close(self) -> None:
        """Drop the references to the source."""
        self._offer = self.manifest = None


class InprocReceiver(WeightReceiver):
    """Reads what an `InprocSender` offers."""

    def __init__(self, sender: InprocSender) -> None:
        self._sender = sender

    def receive(self, manifest: WeightManifest) -> Iterator[NamedTensor]:
        """As `WeightReceiver.receive`, in manifest order. `SyncError` when another version is on offer."""
        for spec in manifest.tensors:
            offer = self._sender.on_offer(manifest)
            yield spec.name, offer.cast(offer.index[spec.name])
        self._sender.on_offer(manifest).check()

    def receive_into(self, shadow: Mapping[str, Tensor], manifest: WeightManifest) -> dict[str, Arrival]:
        """As `WeightReceiver.receive_into`; what lies in files is read straight to its place."""
        arrivals = Arrivals()
        for spec in manifest.tensors:
            offer = self._sender.on_offer(manifest)
            offer.bring(offer.index[spec.name], shadow[spec.name], arrivals)
        self._sender.on_offer(manifest).check()
        return arrivals.told()

    def close(self) -> None:
        """Nothing to let go of: the sender owns the references."""
