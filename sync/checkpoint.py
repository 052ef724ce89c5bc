"""A safetensors checkpoint directory as a source of weights: one file, or the shards that its index names."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sync.errors import ManifestMismatch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def is_checkpoint(directory: Path) -> bool:
    """Whether weights in the safetensors format are there."""
    return (directory / SINGLE_FILE).is_file() or (directory / INDEX_FILE).is_file()


def map_checkpoint(directory: Path) -> dict[str, Tensor]:
    """Name -> mapped tensor. Raises `ManifestMismatch` naming the file that is absent, cut short or contradicts.

    Pages are read at first use and the mapping ends with its tensors; the files must not be cut meanwhile.
    """
    if (directory / SINGLE_FILE).is_file():
        return dict(_mapped(directory / SINGLE_FILE))
    index = directory / INDEX_FILE
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise ManifestMismatch(f"{index} is not a valid index ({problem}).") from None
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or not (directory / shard).is_file():
            raise ManifestMismatch(f"{index} names the shard '{shard}', which is not in that directory.")
        for name, tensor in _mapped(directory / shard):
            if weight_map.get(name) != shard:
                raise ManifestMismatch(f"'{name}' is in {directory / shard}; {INDEX_FILE} says otherwise.")
            tensors[name] = tensor
    if missing := sorted(set(weight_map) - set(tensors)):
        raise ManifestMismatch(f"{index} names '{missing[0]}', which no shard has.")
    return tensors


def _mapped(path: Path) -> Iterable[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            yield from [(name, file.get_tensor(name)) for name in file.keys()]
    except SafetensorError as problem:
        raise ManifestMismatch(f"{path} cannot be read: {problem}. Save the checkpoint again.") from None
