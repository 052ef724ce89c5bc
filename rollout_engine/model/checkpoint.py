"""A checkpoint directory: found locally or on the hub, its safetensors headers checked, its tensors streamed.

Only safetensors is read: a header that says what lies where, then raw numbers. Headers are checked against the file's
size before anything is mapped, so a truncated or mislabelled file is named instead of crashing later.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
import msgspec
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollout_engine.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_DESCRIPTION_FILES = ["*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"]
_SECOND_COPIES = ["*/*", "consolidated*"]
"""The same weights once more, in formats of other programs."""
_MAX_HEADER_BYTES = 100_000_000
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}


class TensorEntry(NamedTuple):
    """One tensor as its file's header declares it."""

    name: str
    dtype: str
    """safetensors' own spelling: F32, BF16, I64, ..."""
    shape: tuple[int, ...]
    file: Path


def find_directory(model: str, *, weights: bool) -> Path:
    """The local directory of `model`: a path, or a hub id, whose files are then downloaded (weights only if asked).

    Raises `ConfigError` when there is no such directory and the hub has, or can be asked for, nothing of that name.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(
            f"model='{model}' is a file: give the checkpoint's directory (the one that holds config.json)."
        )
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(f"model='{model}': no such directory, and not a hub id ('name' or 'organisation/name').")
    wanted = _DESCRIPTION_FILES + (["*.safetensors"] if weights else [])
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=wanted, ignore_patterns=_SECOND_COPIES))
    except (OSError, HFValidationError) as problem:  # offline, absent and forbidden are all OSErrors
        raise ConfigError(
            f"model='{model}': no such directory, and as a hub id it could not be fetched ({_first_line(problem)}). "
            "Check the spelling, or download it where there is a network and give the directory."
        ) from None


def read_entries(directory: Path) -> list[TensorEntry]:
    """Every tensor of the checkpoint, from the headers of its one file or of the shards its index names.

    Raises `ConfigError` naming the file, and the tensor where one is at fault: absent or cut files, headers that
    contradict the bytes, an index that contradicts the shards.
    """
    if (directory / SINGLE_FILE).is_file():
        return _read_header(directory / SINGLE_FILE)
    if (directory / INDEX_FILE).is_file():
        return _read_shards(directory / INDEX_FILE)
    pickles = sorted(p.name for p in directory.glob("pytorch_model*.bin"))
    if pickles:
        raise ConfigError(
            f"{directory} has its weights in {pickles[0]}, a pickle, which can run code when read; only safetensors is "
            "loaded. Convert it: from_pretrained(...).save_pretrained(...) writes safetensors."
        )
    raise ConfigError(
        f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}: give one with weights, or load_format='dummy'."
    )


def stream(entries: list[TensorEntry]) -> Iterator[tuple[TensorEntry, Tensor]]:
    """The tensors, mapped one at a time, file by file. They are valid until the next one is asked for."""
    by_file: dict[Path, list[TensorEntry]] = {}
    for entry in entries:
        by_file.setdefault(entry.file, []).append(entry)
    for path, members in by_file.items():
        try:
            with safe_open(path, framework="pt") as file:
                for entry in members:
                    yield entry, file.get_tensor(entry.name)
        except SafetensorError as problem:
            raise ConfigError(f"{path} cannot be read: {problem}. Download it again.") from None


class _Declared(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor's entry in a safetensors header; offsets count from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _read_header(path: Path) -> list[TensorEntry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ConfigError(
                f"{path} is not a safetensors file, or is cut short: its first 8 bytes announce a header of {length} "
                f"bytes, the file has {size} in all. Download it again."
            )
        header = file.read(length)
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path} is not a safetensors file: its header is not valid ({problem}).") from None
    raw.pop("__metadata__", None)
    return [_checked(path, name, declared, size - 8 - length) for name, declared in raw.items()]


def _checked(path: Path, name: str, raw: msgspec.Raw, num_bytes: int) -> TensorEntry:
    """The entry of one tensor: shape and dtype agree with its bytes, which lie within `num_bytes` of data."""
    try:
        declared = msgspec.json.decode(raw, type=_Declared)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path}: the header's entry of tensor '{name}' is not valid ({problem}).") from None
    start, end = declared.data_offsets
    bits = _BITS.get(declared.dtype)
    if bits is None:
        raise ConfigError(f"{path}: tensor '{name}' has dtype {declared.dtype}, which is not known here.")
    shape = list(declared.shape)
    if min(shape, default=0) < 0 or start < 0 or (end - start) * 8 != math.prod(shape) * bits:
        raise ConfigError(
            f"{path}: tensor '{name}' is mislabelled: {declared.dtype} of shape {shape} does not fill "
            f"bytes {start} to {end}."
        )
    if end > num_bytes:
        raise ConfigError(
            f"{path} is cut short: tensor '{name}' ends at byte {end} of the data, the file has {num_bytes}. "
            "Download it again."
        )
    return TensorEntry(name, declared.dtype, declared.shape, path)


def _read_shards(index_path: Path) -> list[TensorEntry]:
    try:
        weight_map = msgspec.json.decode(index_path.read_bytes(), type=_Index).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{index_path} is not a valid index ({problem}).") from None
    found: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        path = index_path.parent / shard
        if Path(shard).name != shard or not path.is_file():
            raise ConfigError(
                f"{index_path} names the shard '{shard}', which is not in that directory. Download it again."
            )
        for entry in _read_header(path):
            if entry.name in found:
                raise ConfigError(f"Tensor '{entry.name}' is in two shards: {found[entry.name].file} and {path}.")
            found[entry.name] = entry
    for name, shard in weight_map.items():
        if name not in found or found[name].file.name != shard:
            raise ConfigError(f"{index_path} says tensor '{name}' is in '{shard}', and it is not. Download both again.")
    return list(found.values())


def _first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else 'no details'}"
