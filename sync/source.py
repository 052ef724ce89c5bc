"""Reading a weight source: plain names, tied groups, the receiver's dtypes."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from sync.base import Metadata, WeightSource
from sync.errors import ManifestMismatch

NamedTensor = tuple[str, Tensor]


def read_source(source: WeightSource) -> list[NamedTensor]:
    """The (name, tensor) pairs of a module's state dict, a dict, or an iterator; wrapper names removed. No copies.

    Raises `ManifestMismatch` for anything that is not a plain tensor with data, naming it.
    """
    pairs = list(_pairs(source))
    for name, tensor in pairs:
        _check_plain(name, tensor)
    names = _unwrapped([name for name, _ in pairs])
    return [(name, tensor.detach()) for name, (_, tensor) in zip(names, pairs, strict=True)]


def tied_groups(tensors: Sequence[NamedTensor]) -> list[list[str]]:
    """Names that are one and the same memory, grouped in order of first appearance; only groups of two or more."""
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors:
        if tensor.numel():
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            groups.setdefault(place, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def cast_for(name: str, tensor: Tensor, metadata: Metadata) -> Tensor:
    """`tensor` on the CPU, contiguous, in the dtype that `metadata` asks for when both are floating (nearest-even).

    Any other difference is left for the receiver to refuse. A tensor that already fits is returned as it is.
    """
    wanted = metadata[name][0] if name in metadata else None
    dtype: torch.dtype = getattr(torch, wanted) if wanted else tensor.dtype
    if not (dtype.is_floating_point and tensor.is_floating_point()):
        dtype = tensor.dtype
    return tensor.to(device="cpu", dtype=dtype).contiguous()


def _pairs(source: WeightSource) -> Iterable[NamedTensor]:
    if isinstance(source, nn.Module):
        return source.state_dict().items()
    if isinstance(source, Mapping):
        return source.items()
    if isinstance(source, Iterable) and not isinstance(source, (str, bytes, Tensor)):
        return _checked_pairs(source)
    kinds = "an nn.Module, a dict of tensors or an iterator of (name, tensor)"
    raise ManifestMismatch(f"Weights come from {kinds}, not from {type(source).__name__}.")


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
    if hasattr(tensor, "full_tensor"):
        raise ManifestMismatch(f"'{name}' is sharded: pass an iterator of (name, tensor.full_tensor()).")


def _unwrapped(names: list[str]) -> list[str]:
    """Without what torch.compile (`_orig_mod.`, anywhere) and DistributedDataParallel (`module.`, in front) add."""
    plain = [name.replace("_orig_mod.", "") for name in names]
    while plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return plain
