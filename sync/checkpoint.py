"""A safetensors checkpoint directory: one file, or the shards that its index names; a header each, then raw numbers.

Headers are checked against the files' sizes, so a truncated or mislabelled file is named before anything is read from
it. Files may be rewritten, replaced or cut at any time: all tensors are of one moment, or there is an error
(`sync.held_files`).
"""

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch

from sync.deferred import FileTensor
from sync.errors import ManifestMismatch
from sync.held_files import HeldFile, open_settled

logger = logging.getLogger("sync")

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

_MAX_HEADER_BYTES = 100_000_000
_AGAIN = "Save or download it again."
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}


class StoredTensor(FileTensor):
    """One tensor of a checkpoint, as its file's header declares it: `start` is its first byte in the file."""

    def __init__(
        self,
        name: str,
        stored_dtype: str,
        shape: tuple[int, ...],
        file: HeldFile,
        start: int,
        check: Callable[[], None],
    ) -> None:
        super().__init__(shape, _DTYPES[stored_dtype], lambda out, at: file.fetch(out, start + at), check)
        self.name, self.path = name, file.path
        self.stored_dtype = stored_dtype
        """safetensors' own spelling: F32, BF16, I64, ..."""


def is_checkpoint(directory: Path) -> bool:
    """Whether weights in the safetensors format are there."""
    return (directory / SINGLE_FILE).is_file() or (directory / INDEX_FILE).is_file()


def read_checkpoint(directory: Path, *, being_trained: bool = False) -> list[StoredTensor]:
    """Every tensor of the checkpoint, in the order in which they lie in its files; their bytes are read when asked for.

    Args:
        being_trained: a trainer may be saving to the directory. Say so in the log if its files look like a save that
            has not finished; bytes alone cannot tell.

    Raises `ManifestMismatch`, naming the file, and the tensor where one is at fault: absent or cut files, headers that
    contradict the bytes, an index that contradicts the shards. `ChecksumMismatch` when files keep changing.
    """
    files = open_settled(lambda: _CheckpointFiles(directory))
    if being_trained:
        files.warn_if_unfinished()
    tensors = [tensor for shard in files.shards for tensor in _read_header(shard, files.check)]
    if files.index is not None:
        _check_index(files.index.path, files.weight_map, tensors)
    return tensors


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _CheckpointFiles:
    """All files of a checkpoint, held open. Satisfies `HeldFiles`."""

    def __init__(self, directory: Path) -> None:
        config = directory / CONFIG_FILE
        self.files = [HeldFile(config)] if config.is_file() else []
        self.index: HeldFile | None = None
        self.weight_map: dict[str, str] = {}
        """By tensor, the shard's name; of the index."""
        if (directory / SINGLE_FILE).is_file():
            self.shards = [HeldFile(directory / SINGLE_FILE)]
        else:
            self.index = HeldFile(directory / INDEX_FILE)
            self.weight_map = _read_index(self.index)
            self.shards = [HeldFile(_shard(self.index.path, name)) for name in sorted(set(self.weight_map.values()))]
            self.files.append(self.index)
        self.files += self.shards

    def check(self) -> None:
        """Raise `ChecksumMismatch` unless all files are as they were, and what their paths name."""
        for file in self.files:
            file.check()

    def warn_if_unfinished(self) -> None:
        """A save writes the index last; one over an older checkpoint has shards on both sides of it meanwhile."""
        if self.index is None:
            return
        saved = self.index.stamp.modified
        newer = [shard.path for shard in self.shards if shard.stamp.modified > saved]
        older = [shard.path for shard in self.shards if shard.stamp.modified <= saved]
        if newer and older:
            what = f"{newer[0]} is newer than {self.index.path.name} and {older[0].name} is older"
            advice = (
                "If a save is under way, or was broken off, these weights are a mixture: update once it is complete."
            )
            logger.warning("%s: so it is while a checkpoint is saved over another one. %s", what, advice)


def _read_index(index: HeldFile) -> dict[str, str]:
    try:
        return msgspec.json.decode(index.content(), type=_Index).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise ManifestMismatch(f"{index.path} is not a valid index ({problem}).") from None


def _shard(index: Path, name: str) -> Path:
    if Path(name).name != name or not (index.parent / name).is_file():
        raise ManifestMismatch(f"{index} names the shard '{name}', which is not in that directory. {_AGAIN}")
    return index.parent / name


class _Declared(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor's entry in a safetensors header; offsets count from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _read_header(file: HeldFile, check: Callable[[], None]) -> Iterator[StoredTensor]:
    path, size = file.path, file.stamp.size
    first = bytearray(min(8, size))
    file.fetch(memoryview(first), 0)
    length = int.from_bytes(first, "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        what = f"its first 8 bytes announce a header of {length} bytes, the file has {size} in all"
        raise ManifestMismatch(f"{path} is not a safetensors file, or is cut short: {what}. {_AGAIN}")
    header = bytearray(length)
    file.fetch(memoryview(header), 8)
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise ManifestMismatch(f"{path} is not a safetensors file: its header is not valid ({problem}).") from None
    raw.pop("__metadata__", None)
    declared = [(name, _checked(path, name, entry, size - 8 - length)) for name, entry in raw.items()]
    declared.sort(key=lambda pair: pair[1].data_offsets)
    end = 0
    for name, entry in declared:
        if entry.data_offsets[0] != end:
            what = f"tensor '{name}' begins at byte {entry.data_offsets[0]} of the data, the one before ends at {end}"
            raise ManifestMismatch(f"{path} is not a valid safetensors file: {what}.")
        end = entry.data_offsets[1]
        yield StoredTensor(name, entry.dtype, entry.shape, file, 8 + length + entry.data_offsets[0], check)


def _checked(path: Path, name: str, raw: msgspec.Raw, num_bytes: int) -> _Declared:
    """The entry of one tensor: shape and dtype agree with its bytes, which lie within `num_bytes` of data."""
    try:
        declared = msgspec.json.decode(raw, type=_Declared)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise ManifestMismatch(f"{path}: the header's entry of tensor '{name}' is not valid ({problem}).") from None
    start, end = declared.data_offsets
    dtype = _DTYPES.get(declared.dtype)
    if dtype is None:
        raise ManifestMismatch(f"{path}: tensor '{name}' has dtype {declared.dtype}, which is not known here.")
    shape = list(declared.shape)
    if min(shape, default=0) < 0 or start < 0 or end - start != math.prod(shape) * dtype.itemsize:
        what = f"{declared.dtype} of shape {shape} does not fill bytes {start} to {end}"
        raise ManifestMismatch(f"{path}: tensor '{name}' is mislabelled: {what}.")
    if end > num_bytes:
        what = f"tensor '{name}' ends at byte {end} of the data, the file has {num_bytes}"
        raise ManifestMismatch(f"{path} is cut short: {what}. {_AGAIN}")
    return declared


def _check_index(index: Path, weight_map: dict[str, str], tensors: list[StoredTensor]) -> None:
    found: dict[str, StoredTensor] = {}
    for tensor in tensors:
        if tensor.name in found:
            places = f"{found[tensor.name].path} and {tensor.path}"
            raise ManifestMismatch(f"Tensor '{tensor.name}' is in two shards: {places}.")
        found[tensor.name] = tensor
    for name, shard in weight_map.items():
        if name not in found or found[name].path.name != shard:
            raise ManifestMismatch(f"{index} says tensor '{name}' is in '{shard}', and it is not. {_AGAIN}")
