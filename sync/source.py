"""Reading a weight source: plain names, tied groups, full tensors, the receiver's dtypes."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from sync.arrival import put
from sync.base import Metadata, WeightSource
from sync.checkpoint import is_checkpoint, map_checkpoint
from sync.errors import ManifestMismatch, SyncError
from sync.looks import Looks
from sync.manifest import TensorSpec, WeightManifest, dtype_name, torch_dtype
from sync.published import is_store, open_current
from sync.threads import in_threads

NamedTensor = tuple[str, Tensor]


class Offer:
    """A source as one receiver will hold it: tied groups once, floating dtypes as the receiver wants them.

    Nothing is cast or gathered before `manifest` asks for it, one tensor at a time.
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
        return full(tensor).to(_wanted_dtype(name, tensor, self._metadata))

    def in_form(self, i: int) -> Tensor | None:
        """Tensor `i` itself, if it is whole, contiguous and in its form's dtype as it lies."""
        tensor = self.tensors[i][1]
        fits = not is_sharded(tensor) and dtype_name(tensor.dtype) == self.forms[i].dtype and tensor.is_contiguous()
        return tensor if fits else None

    def write(self, i: int, out: Tensor) -> str:
        """Tensor `i`, cast, into `out`, which has its form; the digest of what lies there then."""
        return put(out, full(self.tensors[i][1]))

    def place(self, i: int, out: Tensor) -> None:
        """As `write`, without a digest: `out` need not be read, which takes far longer on a device."""
        out.copy_(full(self.tensors[i][1]))

    def manifest_in_place(self, version: int) -> WeightManifest:
        """The manifest of what stays where it is, a device's on the device. Sharded tensors are gathered now, once, and
        kept on the host in their form."""
        looks = Looks(finite=False)
        for i, (name, tensor) in enumerate(self.tensors):
            cast = self.cast(i)
            looks.at(cast)
            if is_sharded(tensor):
                self.tensors[i] = (name, cast.cpu())
        return self._manifest(version, [look.digest for look in looks.told()])

    def manifest(self, version: int, write: Callable[[int], str], num_threads: int) -> WeightManifest:
        """The manifest; `write(i)` places tensor `i` and says its digest, several at once on `num_threads` threads."""
        if any(is_sharded(tensor) for _, tensor in self.tensors):
            digests = list(map(write, range(len(self.forms))))  # gathering is collective: every rank in this order
        else:
            sizes = [form.num_bytes for form in self.forms]
            digests = in_threads(write, range(len(self.forms)), num_threads, sizes)
        return self._manifest(version, digests)

    def _manifest(self, version: int, digests: Sequence[str]) -> WeightManifest:
        specs = [
            TensorSpec(form.name, form.shape, form.dtype, digest)
            for form, digest in zip(self.forms, digests, strict=True)
        ]
        return WeightManifest.of(version, specs, self.aliases)


class HeldOffer:
    """What a sender that reads its source once more has on offer: references to tensors, copies of gathered ones."""

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


def read_source(source: WeightSource) -> list[NamedTensor]:
    """The (name, tensor) pairs of a source; wrapper names removed. No copies: tensors of a path are mapped.

    Raises `ManifestMismatch` for anything that is not a plain tensor with data, naming it.
    """
    pairs = list(_pairs(source))
    for name, tensor in pairs:
        _check_plain(name, tensor)
    names = _unwrapped([name for name, _ in pairs])
    # A sharded tensor is known by its identity, which detaching would lose.
    tensors = (tensor if is_sharded(tensor) else tensor.detach() for _, tensor in pairs)
    return list(zip(names, tensors, strict=True))


def join_gathers(source: WeightSource) -> None:
    """What every other rank of a sharded trainer calls while the sending rank offers or publishes the same source.

    Gathering a full tensor is collective; the sending rank does it once for each sharded tensor, in source order.
    """
    for _, tensor in Offer(source, {}).tensors:
        full(tensor)


def tied_groups(tensors: Sequence[NamedTensor]) -> list[list[str]]:
    """Names that are one and the same memory, grouped in order of first appearance; only groups of two or more."""
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors:
        if is_sharded(tensor):
            groups.setdefault(id(tensor), []).append(name)
        elif tensor.numel():
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            groups.setdefault(place, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds only a part (a DTensor, as FSDP2 and tensor parallelism make them)."""
    return hasattr(tensor, "full_tensor")


def full(tensor: Tensor) -> Tensor:
    """`tensor` whole and detached; gathers a sharded one from every rank, which all have to call this."""
    if is_sharded(tensor):
        with torch.no_grad():
            gathered: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
            return gathered.detach()
    return tensor


def _wanted_dtype(name: str, tensor: Tensor, metadata: Metadata) -> torch.dtype:
    wanted = torch_dtype(metadata[name][0]) if name in metadata else tensor.dtype
    return wanted if wanted.is_floating_point and tensor.is_floating_point() else tensor.dtype


def _pairs(source: WeightSource) -> Iterable[NamedTensor]:
    if isinstance(source, nn.Module):
        return source.state_dict(keep_vars=True).items()
    if isinstance(source, Mapping):
        return source.items()
    if isinstance(source, str | os.PathLike):
        return _mapped_pairs(Path(source))
    if isinstance(source, Iterable) and not isinstance(source, (bytes, Tensor)):
        return _checked_pairs(source)
    kinds = "an nn.Module, a dict of tensors, an iterator of (name, tensor), or the path of a store or checkpoint"
    raise ManifestMismatch(f"Weights come from {kinds}, not from {type(source).__name__}.")


def _mapped_pairs(path: Path) -> Iterable[NamedTensor]:
    """A store's tensors hold its lease, so nothing has to be closed."""
    if is_store(path):
        return open_current(path).tensors.items()
    if is_checkpoint(path):
        return map_checkpoint(path).items()
    if (path / "meta.json").is_file():
        what = "a bare memory-mapped TensorDict, which has no version and no digests and may be half-written"
        raise ManifestMismatch(f"{path} is {what}. Publish it: sync.publish(directory, source, version).")
    wanted = "a published store (sync.publish makes one) or a checkpoint with model.safetensors"
    raise ManifestMismatch(f"{path} is not {wanted}.")


def _checked_pairs(source: Iterable[NamedTensor]) -> Iterable[NamedTensor]:
    for i, item in enumerate(source):
        if not (isinstance(item, tuple) and len(item) == 2):
            what = f"is {type(item).__name__}, not a (name, tensor) pair"
            raise ManifestMismatch(f"Item {i} of the weight iterator {what}.")
        yield item


def _check_plain(name: object, tensor: object) -> None:
    if not isinstance(name, str):
        raise ManifestMismatch(f"A weight is named {name!r}: names are strings.")
    if not isinstance(tensor, Tensor):
        raise ManifestMismatch(f"'{name}' is {type(tensor).__name__}, not a tensor.")
    if tensor.is_meta:
        raise ManifestMismatch(f"'{name}' is on the meta device: it has no values to send.")
    if tensor.layout != torch.strided:
        raise ManifestMismatch(f"'{name}' has layout {tensor.layout}: only dense tensors travel.")


def _unwrapped(names: list[str]) -> list[str]:
    """Without what torch.compile (`_orig_mod.`, anywhere) and DistributedDataParallel (`module.`, in front) add."""
    plain = [name.replace("_orig_mod.", "") for name in names]
    while plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return plain
