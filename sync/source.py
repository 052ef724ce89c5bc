"""Reads a weight source: a list of plain names and tensors, and which of them are tied."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from torch import Tensor, nn

from sync.base import WeightSource
from sync.checkpoint import is_checkpoint, read_checkpoint
from sync.errors import GatherFailed, ManifestMismatch
from sync.lazy_tensor import GatheredTensor, LazyTensor, is_sharded
from sync.manifest import check_distinct
from sync.plain_names import plain_names
from sync.published import is_store, read_current
from sync.sendable import check_sendable
from sync.wrapped_modules import state_of

SourceTensor: TypeAlias = Tensor | LazyTensor
NamedTensor = tuple[str, Tensor]
SourcePair = tuple[str, SourceTensor]


def read_source(source: WeightSource) -> list[SourcePair]:
    """(name, tensor) pairs of a source, without the prefixes that wrappers add. Nothing is copied, gathered or read.

    Raises `ManifestMismatch` for anything that is not a plain tensor with data, naming it.
    """
    pairs = list(_pairs(source))
    for name, tensor in pairs:
        check_sendable(name, tensor)
    names = plain_names([name for name, _ in pairs])
    check_distinct(names, "The source")
    return list(zip(names, (_detach(tensor) for _, tensor in pairs), strict=True))


def join_gathers(source: WeightSource) -> None:
    """Take part in gathering `source`: every other rank of a sharded trainer calls this while the sending rank offers,
    publishes or updates from the same source.

    Gathering a full tensor is collective; the sending rank does it once for each sharded tensor, in source order. It
    does so even if its update is refused, so this returns then, too. Raises `GatherFailed` if a rank has ended,
    or did not join within the timeout of the process group.
    """
    _gather_rest(read_source(source))


@contextmanager
def gathers_finished(pairs: Sequence[SourcePair]) -> Iterator[None]:
    """Gather the rest at the block's end, so that ranks in `join_gathers` never wait for one that has failed.

    Not after `GatherFailed`, nor if the block was interrupted.
    """
    try:
        yield
    except Exception as problem:
        cause: BaseException | None = problem
        while cause is not None and not isinstance(cause, GatherFailed):
            cause = cause.__cause__
        if cause is None:
            _gather_rest(pairs)
        raise
    _gather_rest(pairs)


def _gather_rest(pairs: Sequence[SourcePair]) -> None:
    repeated = {name for group in tied_groups(pairs) for name in group[1:]}
    for name, tensor in pairs:
        if name not in repeated and isinstance(tensor, LazyTensor) and tensor.is_collective and not tensor.was_begun:
            tensor.materialize()


def tied_groups(tensors: Sequence[SourcePair]) -> list[list[str]]:
    """Names that are one and the same memory, grouped in order of first appearance; only groups of two or more."""
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors:
        if isinstance(tensor, LazyTensor):
            groups.setdefault(tensor.identity, []).append(name)
        elif tensor.numel():
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            groups.setdefault(place, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _detach(tensor: SourceTensor) -> SourceTensor:
    if isinstance(tensor, LazyTensor):
        return tensor
    return GatheredTensor(tensor) if is_sharded(tensor) else tensor.detach()


def _pairs(source: WeightSource) -> Iterable[SourcePair]:
    if isinstance(source, nn.Module):
        return state_of(source)
    if isinstance(source, Mapping):
        return source.items()
    if isinstance(source, str | os.PathLike):
        return _stored_pairs(Path(os.path.expanduser(source)))
    if isinstance(source, Iterable) and not isinstance(source, (bytes, Tensor)):
        return _checked_pairs(source)
    kinds = "an nn.Module, a dict of tensors, an iterator of (name, tensor), or the path of a store or checkpoint"
    hint = " Pass its .model." if isinstance(getattr(source, "model", None), nn.Module) else ""
    raise ManifestMismatch(f"Weights come from {kinds}, not from {type(source).__name__}.{hint}")


def _stored_pairs(path: Path) -> Iterable[SourcePair]:
    """The tensors of a store or checkpoint. They keep the lease, or the files open, so nothing has to be closed."""
    if is_store(path):
        return read_current(path).items()
    if is_checkpoint(path):
        return [(tensor.name, tensor) for tensor in read_checkpoint(path, being_trained=True)]
    if (path / "meta.json").is_file():
        what = "a bare memory-mapped TensorDict, which has no version and no digests and may be half-written"
        raise ManifestMismatch(f"{path} is {what}. Publish it: sync.publish(directory, source, version).")
    wanted = "a published store (sync.publish makes one) or the directory of a checkpoint with model.safetensors"
    if not path.exists():
        raise ManifestMismatch(
            f"{path.absolute()} does not exist: give the path of {wanted}; hub ids are not taken here."
        )
    hint = " Engines read GGUF files (update_weights), and exact.load does." if path.suffix == ".gguf" else ""
    raise ManifestMismatch(f"{path} is not {wanted}.{hint}")


def _checked_pairs(source: Iterable[SourcePair]) -> Iterable[SourcePair]:
    for i, item in enumerate(source):
        if not (isinstance(item, tuple) and len(item) == 2):
            what = f"is {type(item).__name__}, not a (name, tensor) pair"
            raise ManifestMismatch(f"Item {i} of the weight iterator {what}.")
        yield item
