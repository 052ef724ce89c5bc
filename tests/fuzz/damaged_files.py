"""Damages files of a checkpoint: bits flipped, bytes cut and moved, headers swapped, fields of JSON changed."""

import copy
import json
import random
import struct
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

ODD = [None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 10**12, 0.5, "", "x", "4", [], [1], {}, {"x": 1}, "float32", 1e30]


def damage(directory: Path, name: str, rng: random.Random) -> str:
    """Damage the file of this name in one way; returns which. Other files are damaged only if two swap headers."""
    path = directory / name
    content = path.read_bytes()
    kinds = ["flip", "flip", "flip", "cut", "grow", "move", "double", "zero", "remove"]
    if name.endswith(".json"):
        kinds += ["field"] * 12
    if name.endswith(".safetensors"):
        kinds += ["header"] * 4 + ["entry"] * 8
    kind = rng.choice(kinds)
    if kind == "remove":
        path.unlink()
    elif kind == "field":
        path.write_text(json.dumps(_changed(json.loads(content), rng)))
    elif kind == "entry":
        length = struct.unpack("<Q", content[:8])[0]
        header = json.dumps(_changed(json.loads(content[8 : 8 + length]), rng)).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    elif kind == "header":
        _swap_headers(path, rng.choice(sorted(directory.glob("*.safetensors"))))
    else:
        path.write_bytes(_damaged(content, kind, _end_of_interest(name, content, rng), rng))
    return f"{kind} {name}"


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    """The tensors as the safetensors library reads them, of the one file or of the shards that the index names."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    files = (
        [single]
        if single.exists()
        else sorted(directory / name for name in set(json.loads(index.read_bytes())["weight_map"].values()))
    )
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            assert not found.keys() & tensors.keys(), "a tensor in two shards"
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


def _end_of_interest(name: str, content: bytes, rng: random.Random) -> int:
    """Damage is done before this byte: mostly in the header of a file of tensors."""
    if not name.endswith((".safetensors", ".gguf")) or rng.random() < 0.2:
        return len(content)
    if name.endswith(".gguf"):
        return content.rindex(b".weight") + 64  # the last entry of its table
    return 8 + struct.unpack("<Q", content[:8])[0]


def _damaged(content: bytes, kind: str, end: int, rng: random.Random) -> bytes:
    out, at = bytearray(content), rng.randrange(end)
    size = rng.randint(1, 64)
    match kind:
        case "flip":
            out[at] ^= 1 << rng.randrange(8)
        case "cut":
            del out[rng.randrange(len(out)) if rng.random() < 0.5 else at :]
        case "grow":
            out += rng.randbytes(size)
        case "move":
            piece = out[at : at + size]
            del out[at : at + size]
            place = rng.randrange(end)
            out[place:place] = piece
        case "double":
            out[at:at] = out[at : at + size]
        case "zero":
            out[at : at + size] = bytes(len(out[at : at + size]))
    return bytes(out)


def _swap_headers(one: Path, other: Path) -> None:
    parts = []
    for path in (one, other):
        content = path.read_bytes()
        end = 8 + struct.unpack("<Q", content[:8])[0]
        parts.append((content[:end], content[end:]))
    if one == other:
        one.write_bytes(parts[0][0] + parts[0][0] + parts[0][1])
        return
    one.write_bytes(parts[1][0] + parts[0][1])
    other.write_bytes(parts[0][0] + parts[1][1])


def _changed(content: Any, rng: random.Random) -> Any:
    """A copy of JSON with one place changed, removed, renamed or given the value of another place."""
    content = copy.deepcopy(content)
    places = list(_places(content))
    if not places:
        return rng.choice(ODD)
    holder, key = rng.choice(places)
    match rng.randrange(5):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[key[:-1] + "_"] = holder.pop(key)
        case 2:
            other, place = rng.choice(places)
            holder[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(holder[key])
        case 3 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = rng.choice([holder[key] + 1, holder[key] - 1, holder[key] * 2, -holder[key], holder[key] / 2])
        case _:
            holder[key] = copy.deepcopy(rng.choice(ODD))
    return content


def _places(content: Any) -> Any:
    keys = content.keys() if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in list(keys):
        yield content, key
        yield from _places(content[key])
