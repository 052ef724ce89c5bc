"""The offer of a sender: a source as the receiver will hold it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sync.arrival import Arrivals, put, read
from sync.base import Metadata, WeightSource
from sync.deferred import Deferred, FileTensor, whole
from sync.errors import SyncError
from sync.looks import Looks
from sync.manifest import TensorSpec, WeightManifest, dtype_name, torch_dtype
from sync.source import SourceTensor, read_source, tied_groups
from sync.threads import in_threads


class Offer:
    """A source as one receiver will hold it: tied groups once, floating dtypes as the receiver wants them.

    Nothing is cast, gathered, computed or read before `manifest` asks for it, one tensor at a time.
    """

    def __init__(self, source: WeightSource, metadata: Metadata) -> None:
        pairs = read_source(source)
        self.aliases = tied_groups(pairs)
        repeated = {name for group in self.aliases for name in group[1:]}
        self.tensors = [pair for pair in pairs if pair[0] not in repeated]
        self._metadata = metadata
        self.forms = [
            TensorSpec(name, tuple(tensor.shape), dtype_name(_wanted_dtype(name, tensor, metadata)), digest="")
            for name, tensor in self.tensors
        ]
        """Specs without digests."""
        self.index = {form.name: i for i, form in enumerate(self.forms)}

    def cast(self, i: int) -> Tensor:
        """Tensor `i` where it lies, whole, in its form's dtype (nearest-even); the source's own where it is so already.

        Only floating dtypes are cast: any other difference is left for the receiver to refuse.
        """
        name, tensor = self.tensors[i]
        return whole(tensor).to(_wanted_dtype(name, tensor, self._metadata))

    def in_form(self, i: int) -> Tensor | None:
        """Tensor `i` itself, if it is whole, contiguous and in its form's dtype as it lies."""
        tensor = self.tensors[i][1]
        if isinstance(tensor, Deferred) or not self._has_form(i) or not tensor.is_contiguous():
            return None
        return tensor

    def write(self, i: int, out: Tensor) -> str:
        """Tensor `i`, cast, into `out`, which has its form; the digest of what lies there then."""
        tensor = self.tensors[i][1]
        if isinstance(tensor, FileTensor) and self._has_form(i):
            return read(out, tensor.fetch).digest
        return put(out, whole(tensor))

    def place(self, i: int, out: Tensor) -> None:
        """As `write`, without a digest: `out` need not be read, which takes far longer on a device."""
        out.copy_(whole(self.tensors[i][1]))

    def bring(self, i: int, out: Tensor, arrivals: Arrivals) -> None:
        """As `write`; `arrivals` will tell what lies in `out` then."""
        name, tensor = self.tensors[i]
        if isinstance(tensor, FileTensor) and self._has_form(i):
            arrivals.fetch(name, out, tensor.fetch)
        else:
            arrivals.take(name, out, self.cast(i))

    def check(self) -> None:
        """Raise `ChecksumMismatch` if files that are read have changed since they were opened."""
        for check in {tensor.check for _, tensor in self.tensors if isinstance(tensor, FileTensor)}:
            check()

    def manifest_in_place(self, version: int) -> WeightManifest:
        """The manifest of what stays where it is, a device's on the device.

        Tensors that have to be gathered or computed are so now, once, and kept on the host in their form.
        """
        looks, digests = Looks(finite=False), [""] * len(self.tensors)
        looked_at: list[int] = []
        for i, (name, tensor) in enumerate(self.tensors):
            if isinstance(tensor, FileTensor) and self._has_form(i):
                digests[i] = tensor.digest()
                continue
            cast = self.cast(i)
            looks.at(cast)
            looked_at.append(i)
            if isinstance(tensor, Deferred) and not isinstance(tensor, FileTensor):
                self.tensors[i] = (name, cast.cpu())
        for i, look in zip(looked_at, looks.told(), strict=True):
            digests[i] = look.digest
        return self._manifest(version, digests)

    def manifest(self, version: int, write: Callable[[int], str], num_threads: int) -> WeightManifest:
        """The manifest; `write(i)` places tensor `i` and says its digest, several at once on `num_threads` threads."""
        if any(isinstance(tensor, Deferred) and tensor.is_collective for _, tensor in self.tensors):
            digests = list(map(write, range(len(self.forms))))  # gathering is collective: every rank in this order
        else:
            sizes = [form.num_bytes for form in self.forms]
            digests = in_threads(write, range(len(self.forms)), num_threads, sizes)
        return self._manifest(version, digests)

    def _manifest(self, version: int, digests: Sequence[str]) -> WeightManifest:
        self.check()
        specs = [
            TensorSpec(form.name, form.shape, form.dtype, digest)
            for form, digest in zip(self.forms, digests, strict=True)
        ]
        return WeightManifest.of(version, specs, self.aliases)

    def _has_form(self, i: int) -> bool:
        return dtype_name(self.tensors[i][1].dtype) == self.forms[i].dtype


class HeldOffer:
    """The offer of a sender that reads its source once more: references to tensors, copies of gathered ones."""

    def __init__(self) -> None:
        self._held: tuple[Offer, WeightManifest] | None = None

    def make(self, source: WeightSource, version: int, metadata: Metadata) -> WeightManifest:
        """As `WeightSender.offer`."""
        offer = Offer(source, metadata)
        self._held = offer, offer.manifest_in_place(version)
        return self._held[1]

    def get(self) -> tuple[Offer, WeightManifest]:
        """`SyncError` when there is nothing."""
        if self._held is None:
            raise SyncError("Nothing is on offer: call offer first.")
        return self._held

    def drop(self) -> None:
        """Let go of the source."""
        self._held = None


def _wanted_dtype(name: str, tensor: SourceTensor, metadata: Metadata) -> torch.dtype:
    wanted = torch_dtype(metadata[name][0]) if name in metadata else tensor.dtype
    return wanted if wanted.is_floating_point and tensor.dtype.is_floating_point else tensor.dtype
