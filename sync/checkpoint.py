"""Reads a safetensors checkpoint directory: one file, or the shards that its index names, each a header and raw bytes.

Headers are checked against the files' sizes, so a truncated or mislabelled file is named before anything is read from
it. Files may be rewritten, replaced or cut at any time: all tensors are of one moment, or there is an error
(`sync.file_snapshot`).
"""

import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from sync.errors import ManifestMismatch
from sync.file_snapshot import FileSet, SnapshotFile, open_snapshot
from sync.manifest import MAX_NAMES, check_name, check_shape, decode_json
from sync.quantised.reader import CheckpointTensor, read_format, read_weights
from sync.stored_tensor import STORED_DTYPES, StoredTensor

logger = logging.getLogger("sync")

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

_MAX_HEADER_BYTES = 100_000_000
_AGAIN = "Save or download it again."


def is_checkpoint(directory: Path) -> bool:
    """Whether `directory` has weights in the safetensors format."""
    return os.path.lexists(directory / SINGLE_FILE) or os.path.lexists(directory / INDEX_FILE)


def read_checkpoint(directory: Path, *, being_trained: bool = False) -> list[CheckpointTensor]:
    """Every tensor of the checkpoint; their bytes are read when asked for.

    If config.json has a quantization_config, quantised weights are float32 tensors under the names of plain ones, to be
    dequantised when asked for (`sync.quantised`). The log names the format.

    Args:
        being_trained: a trainer may be saving to the directory. Log a warning if its files look like an unfinished
            save, which cannot be known from their bytes.

    Raises `ManifestMismatch`, naming the file, and the tensor if one is at fault: absent or cut files, headers that
    contradict the bytes, an index that contradicts the shards, a quantised format that is not read. `ChecksumMismatch`
    when files keep changing.
    """
    files = open_snapshot(lambda: _CheckpointFiles(directory))
    if being_trained:
        files.warn_if_unfinished()
    tensors = [tensor for shard in files.shards for tensor in _read_header(shard, files.check)]
    if files.index is not None:
        _check_index(files.index.path, files.weight_map, tensors)
    form = None if files.config is None else read_format(files.config.path, files.config.content())
    return read_weights(directory / CONFIG_FILE, form, tensors)


def read_tensor_file(path: Path) -> list[StoredTensor]:
    """Every tensor of one safetensors file, as `read_checkpoint` reads those of a checkpoint, with its errors."""
    files = open_snapshot(lambda: OneFile(path))
    return list(_read_header(files.files[0], files.check))


class OneFile(FileSet):
    """One file, held open."""

    def __init__(self, path: Path) -> None:
        self.files = [SnapshotFile(path)]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _CheckpointFiles(FileSet):
    """All files of a checkpoint, held open."""

    def __init__(self, directory: Path) -> None:
        config = directory / CONFIG_FILE
        self.config = SnapshotFile(config) if os.path.lexists(config) else None
        self.files = [] if self.config is None else [self.config]
        self.index: SnapshotFile | None = None
        self.weight_map: dict[str, str] = {}
        """Tensor name -> file name of its shard, from the index."""
        if os.path.lexists(directory / SINGLE_FILE):
            self.shards = [SnapshotFile(directory / SINGLE_FILE)]
        else:
            self.index = SnapshotFile(directory / INDEX_FILE)
            self.weight_map = decode_json(
                self.index.content(), _Index, f"{self.index.path} is not a valid index"
            ).weight_map
            self.shards = [
                SnapshotFile(_shard(self.index.path, name)) for name in sorted(set(self.weight_map.values()))
            ]
            self.files.append(self.index)
        self.files += self.shards

    def warn_if_unfinished(self) -> None:
        """Log a warning if some shards are newer than the index and others older.

        A save writes the index last, so this is the state in the middle of a save over an older checkpoint.
        """
        if self.index is None:
            return
        saved = self.index.stamp.modified
        newer = [shard.path for shard in self.shards if shard.stamp.modified > saved]
        older = [shard.path for shard in self.shards if shard.stamp.modified <= saved]
        if newer and older:
            what = f"{newer[0]} is newer than {self.index.path.name} and {older[0].name} is older"
            advice = (
                "If a save is under way, or was interrupted, these weights are a mixture: update once it is complete."
            )
            logger.warning("%s: this is the state while a checkpoint is saved over another one. %s", what, advice)


def _shard(index: Path, name: str) -> Path:
    if Path(name).name != name or "\0" in name or not os.path.lexists(index.parent / name):
        raise ManifestMismatch(f"{index} names the shard {name[:200]!r}, which is not in that directory. {_AGAIN}")
    return index.parent / name


class _Declared(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor's entry in a safetensors header; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _read_header(file: SnapshotFile, check: Callable[[], None]) -> Iterator[StoredTensor]:
    path, size = file.path, file.stamp.size
    first = bytearray(min(8, size))
    file.fetch(memoryview(first), 0)
    length = int.from_bytes(first, "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        what = f"its first 8 bytes announce a header of {length} bytes, the file has {size} in all"
        raise ManifestMismatch(f"{path} is not a safetensors file, or is cut short: {what}. {_AGAIN}")
    header = bytearray(length)
    file.fetch(memoryview(header), 8)
    what = f"{path} is not a safetensors file: its header is not valid"
    raw = decode_json(header, dict[str, msgspec.Raw], what, f" {_AGAIN}")
    decode_json(bytes(raw.pop("__metadata__", b"{}")), dict[str, str], what, f" {_AGAIN}")
    if len(raw) > MAX_NAMES:
        raise ManifestMismatch(f"{path} has {len(raw)} tensors: at most {MAX_NAMES} are read.")
    declared = [(name, _check_entry(path, name, entry, size - 8 - length)) for name, entry in raw.items()]
    declared.sort(key=lambda pair: pair[1].data_offsets)
    end = 0
    for name, entry in declared:
        if entry.data_offsets[0] != end:
            what = f"tensor '{name}' begins at byte {entry.data_offsets[0]} of the data, the one before ends at {end}"
            raise ManifestMismatch(f"{path} is not a valid safetensors file: {what}. {_AGAIN}")
        end = entry.data_offsets[1]
        yield StoredTensor(name, entry.dtype, entry.shape, file, 8 + length + entry.data_offsets[0], check)
    if end != size - 8 - length:
        what = f"its tensors end at byte {end} of the data, the file has {size - 8 - length}"
        raise ManifestMismatch(f"{path} is not a valid safetensors file: {what}. {_AGAIN}")


def _check_entry(path: Path, name: str, raw: msgspec.Raw, num_bytes: int) -> _Declared:
    """The entry of one tensor, after checks: shape and dtype fit its bytes, which are within `num_bytes` of data."""
    check_name(name)
    what = f"{path}: the header's entry of tensor '{name}' is not valid"
    declared = decode_json(bytes(raw), _Declared, what, f" {_AGAIN}")
    check_shape(name, declared.shape, f"{path}: tensor ")
    start, end = declared.data_offsets
    dtype = STORED_DTYPES.get(declared.dtype)
    if dtype is None:
        raise ManifestMismatch(f"{path}: tensor '{name}' has dtype {declared.dtype}, which is not supported.")
    shape = list(declared.shape)
    if start < 0 or end - start != math.prod(shape) * dtype.itemsize:
        what = f"{declared.dtype} of shape {shape} does not fill bytes {start} to {end}"
        raise ManifestMismatch(f"{path}: tensor '{name}' is mislabelled: {what}. {_AGAIN}")
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
