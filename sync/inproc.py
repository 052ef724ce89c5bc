"""The in-process transport: trainer and engine share one address space, nothing is serialised.

The sender holds on to the trainer's own tensors; the receiver reads them one at a time, casting on the way, each on its
own device. A tensor that changes between `offer` and `receive` no longer has the digest in the manifest, and the update
is refused.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor

from sync.base import WeightReceiver
from sync.errors import SyncError
from sync.manifest import WeightManifest
from sync.offer import HeldOfferSender, Offer
from sync.pieces import Lacking
from sync.source import NamedTensor
from sync.tensor_check import CheckResult
from sync.tensor_writer import HOST_WRITER, TensorWriter, WriteBatch


class InprocSender(HeldOfferSender):
    """Offers a source to receivers in the same process."""

    def get_offer(self, manifest: WeightManifest) -> Offer:
        """The offer that `manifest` describes. `SyncError` after `close`, and if something else is on offer."""
        if self._held is None or self._held[1].digest != manifest.digest:
            raise SyncError(f"Version {manifest.version} is not, or no longer, on offer.")
        return self._held[0]

    def read(self, name: str) -> Tensor:
        """The offered tensor in the receiver's dtype, on its own device. `SyncError` after `close`."""
        offer, _ = self._require_offer()
        return offer.cast(offer.index[name])


class InprocReceiver(WeightReceiver):
    """Reads the tensors that an `InprocSender` offers."""

    takes_part = True

    def __init__(self, sender: InprocSender) -> None:
        self._sender = sender

    def receive(self, manifest: WeightManifest) -> Iterator[NamedTensor]:
        """Yield each tensor in manifest order. `SyncError` when another version is on offer."""
        for spec in manifest.tensors:
            offer = self._sender.get_offer(manifest)
            yield spec.name, offer.cast(offer.index[spec.name])
        self._sender.get_offer(manifest).check()

    def receive_into(
        self,
        shadow: Mapping[str, Tensor],
        manifest: WeightManifest,
        writer: TensorWriter = HOST_WRITER,
        lacking: Lacking | None = None,
    ) -> dict[str, CheckResult]:
        """Write each tensor into `shadow`; tensors in files are read straight to their place."""
        batch = WriteBatch(writer)
        for spec in manifest.tensors:
            if lacking is not None and spec.name not in lacking:
                continue
            offer = self._sender.get_offer(manifest)
            part = lacking[spec.name] if lacking else None
            offer.write_batched(offer.index[spec.name], shadow[spec.name], batch, part)
        self._sender.get_offer(manifest).check()
        return batch.results()
