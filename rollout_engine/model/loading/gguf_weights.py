"""Reads the weights of a GGUF file under the names of Hugging Face modules, as float32.

Rows are dequantised by the package gguf (`gguf.quants`) as they are asked for. An engine and a trainer that load the
same file therefore have the same float32 values, and round them once to their dtype.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.gguf.config import ROPE_FACTORS, config_of
from rollout_engine.base.gguf.header import GgufHeader, GgufTensor
from sync.checkpoint import OneFile
from sync.file_snapshot import open_snapshot
from sync.stored_tensor import StoredTensor

logger = logging.getLogger("rollout_engine")

_BAND_BYTES = 8 << 20
"""Most bytes of float32 that are dequantised at once; the package takes several times as many."""
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""llama.cpp's names -> Hugging Face's, of all architectures in `base/gguf/config.py`."""
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<name>\w+)\.(?P<kind>weight|bias)")
_HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}


class GgufWeight(StoredTensor):
    """A tensor of a GGUF file, or the part of it that is one expert's."""

    def __init__(self, name: str, stored: "_Rows", first: int, shape: tuple[int, ...]) -> None:
        """`first`: its first row in `stored`."""
        super().__init__(name, "F32", shape, stored.files.files[0], 0, stored.files.check)
        self.fetch = lambda out, at: stored.fetch(out, first * stored.row_bytes + at)


class _Rows:
    """A tensor of a file as rows of float32.

    Args:
        order: the row of the file for each row here; None: they are the same.
    """

    def __init__(self, files: OneFile, tensor: GgufTensor, gguf: ModuleType, order: NDArray[np.int64] | None) -> None:
        """Raises `ConfigError` if the format is not known, or the file does not have all of it."""
        self.files, self._gguf, self._order, self._start = files, gguf, order, tensor.start
        path, size = files.files[0].path, files.files[0].stamp.size
        columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
        self._num_rows = math.prod(tensor.shape) // max(columns, 1)
        try:
            self.type = gguf.GGMLQuantizationType(tensor.type)
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[self.type]
            gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), self.type)
        except (KeyError, ValueError, RuntimeError):  # the last is of formats that it does not dequantise
            raise ConfigError(
                f"{path}: {tensor.name} has the format {tensor.type}, which gguf {_version()} does not read. Install a "
                "later gguf, or give another file of the model."
            ) from None
        self.row_bytes, self._stored_bytes = 4 * columns, columns // block_size * block_bytes
        self.num_bytes = self._num_rows * self._stored_bytes
        end = tensor.start + self.num_bytes
        if columns % block_size or end > size or 0 in tensor.shape:
            what = f"{tensor.name} has shape {list(tensor.shape)} in {self.type.name}"
            raise _make_damage_error(path, f"{what} and would end at byte {end}; it has {size}")

    def fetch(self, out: memoryview, at: int) -> None:
        """Fill `out` with the bytes from `at` on of all rows."""
        first, last = at // self.row_bytes, -(-(at + len(out)) // self.row_bytes)
        band = max(1, _BAND_BYTES // self.row_bytes)
        for begin in range(first, last, band):
            end = min(begin + band, last)
            low, high = max(at, begin * self.row_bytes), min(at + len(out), end * self.row_bytes)
            values = self._values(begin, end).data.cast("B")
            out[low - at : high - at] = values[low - begin * self.row_bytes : high - begin * self.row_bytes]

    def _values(self, begin: int, end: int) -> NDArray[np.float32]:
        raw = self._read(begin, end) if self._order is None else self._read_ordered(self._order[begin:end])
        with np.errstate(all="ignore"):  # a float16 may be infinite
            return np.ascontiguousarray(self._gguf.quants.dequantize(raw, self.type), np.float32)

    def _read_ordered(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Read these rows of the file, which are near one another: a head or two."""
        first = int(rows.min())
        found: NDArray[np.uint8] = self._read(first, int(rows.max()) + 1)[rows - first]
        return found

    def _read(self, begin: int, end: int) -> NDArray[np.uint8]:
        out = np.empty((end - begin, self._stored_bytes), np.uint8)
        self.files.files[0].fetch(out.data.cast("B"), self._start + begin * self._stored_bytes)
        return out


def read_gguf(path: Path) -> list[GgufWeight]:
    """Every weight of a GGUF file, under the names of its Hugging Face module; values are read when asked for.

    Raises `ConfigError`, naming the file, if it is damaged, or of an architecture or a format that is not read, or if
    the package gguf is missing; `SyncError` if it is being rewritten.
    """
    path = path.resolve()  # it may be the link in a directory of our own
    gguf = _package(path)
    files = open_snapshot(lambda: OneFile(path))
    header = GgufHeader.read(path)
    config_of(header)  # it refuses architectures whose names and rows are not known here
    stored = {name: _Rows(files, tensor, gguf, _row_order(header, tensor)) for name, tensor in header.tensors.items()}
    _check_places(header, stored, files.files[0].stamp.size)
    stored.pop(ROPE_FACTORS, None)  # they are in the configuration
    weights = [weight for name, rows in stored.items() for weight in _name_weights(header.tensors[name], rows)]
    formats = Counter(rows.type.name for rows in stored.values())
    logger.info(
        "%s is dequantised once, as it is loaded, to float32 (gguf %s), and rounded to nearest for other dtypes: %s.",
        path,
        _version(),
        ", ".join(f"{count} tensors in {name}" for name, count in formats.most_common()),
    )
    return weights


def _check_places(header: GgufHeader, stored: dict[str, "_Rows"], size: int) -> None:
    """Raise `ConfigError` unless the tensors follow one another from the data's first byte to the end of the file.

    Writers of the format put them so, and llama.cpp refuses others; a damaged entry would name another tensor's bytes.
    """
    end = last = header.data
    for name, rows in stored.items():
        start = header.tensors[name].start
        if start != end:
            raise _make_damage_error(header.path, f"{name} begins at byte {start}, expected {end}")
        last = start + rows.num_bytes
        end = header.data + -(-(last - header.data) // header.alignment) * header.alignment
    if not last <= size <= end:
        raise _make_damage_error(header.path, f"its tensors end at byte {last}, and it has {size}")


def _make_damage_error(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} is not a whole GGUF file: {what}. Download or convert it again.")


def _package(path: Path) -> ModuleType:
    try:
        import gguf
        import gguf.quants
    except ImportError:
        how = "pip install 'rollout-engine[gguf]'"
        raise ConfigError(f"{path}: the weights of GGUF files are read with the package gguf: {how}.") from None
    return gguf


def _version() -> str:
    try:
        return version("gguf")
    except PackageNotFoundError:  # a copy on the path
        return "of an unknown version"


def _row_order(header: GgufHeader, tensor: GgufTensor) -> NDArray[np.int64] | None:
    """The row of the file for each row of the module's weight; None if they are in the same order.

    llama.cpp rotates neighbouring elements of a head in its "llama", Hugging Face elements half a head apart: its
    converter reorders the rows of each head, from (half, element) to (element, half).
    """
    match = _NAME.fullmatch(tensor.name)
    architecture = header.need("general.architecture", str)
    if architecture != "llama" or match is None or match["name"] not in _HEADS:
        return None
    num_heads = header.get(f"{architecture}.{_HEADS[match['name']]}", int)
    num_heads = num_heads or header.need(f"{architecture}.attention.head_count", int)
    if not tensor.shape or tensor.shape[0] % (2 * num_heads):
        raise ConfigError(
            f"{header.path}: {tensor.name} has shape {list(tensor.shape)}, not rows for {num_heads} heads."
        )
    order = np.arange(tensor.shape[0]).reshape(num_heads, -1, 2)
    return order.swapaxes(1, 2).reshape(-1)


def _name_weights(tensor: GgufTensor, stored: _Rows) -> Iterator[GgufWeight]:
    """The weights in a tensor under Hugging Face's names; unknown names stay, to be refused."""
    match = _NAME.fullmatch(tensor.name)
    name = tensor.name
    if match is not None and match["name"] in _NAMES:
        layer = "" if match["layer"] is None else f"model.layers.{match['layer']}."
        name = f"{layer}{_NAMES[match['name']]}.{match['kind']}"
    if "{}" not in name or len(tensor.shape) != 3:
        yield GgufWeight(name, stored, 0, tensor.shape)
        return
    for expert in range(tensor.shape[0]):
        yield GgufWeight(name.format(expert), stored, expert * tensor.shape[1], tensor.shape[1:])
