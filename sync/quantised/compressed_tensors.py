"""Files of the library compressed-tensors (LLM Compressor, Kimi K2): integers, packed or not, and 8-bit floats.

Source: compressed-tensors 0.20, `compressors/pack_quantized`, `compressors/naive_quantized` and
`quantization/lifecycle/forward_helpers.py` (`_dequantize`): (code - zero point) * scale.
"""

import re
from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from sync.quantised.numbers import ceil_div, spread, unpack
from sync.quantised.tensors import FLOATS, Recipe, StoredParts
from sync.stored_tensor import StoredTensor

_PACKED = "pack-quantized"
_PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
_READ = (_PACKED, *_PLAIN)


class _Weights(msgspec.Struct, frozen=True):
    """How the weights of a group are quantised."""

    num_bits: int = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: Literal["tensor", "channel", "group", "block"] | None = None
    block_structure: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.type == "float" and (self.num_bits != 8 or not self.symmetric):
            raise ValueError(f"floats of {self.num_bits} bits, symmetric {self.symmetric}: 8 bits and true are read")
        if self.type == "int" and self.num_bits not in (4, 8):
            raise ValueError(f"integers of {self.num_bits} bits: 4 and 8 are read")
        if self.scheme == "group" and (self.group_size is None or self.group_size < 1):
            raise ValueError(f"strategy 'group' with group_size {self.group_size}")
        if self.scheme == "block" and (self.block_structure is None or min(self.block_structure) < 1):
            raise ValueError(f"strategy 'block' with block_structure {self.block_structure}")

    @property
    def scheme(self) -> str:
        """The strategy, or the one that the size of groups implies."""
        by_size = "tensor" if self.group_size is None else "group" if self.group_size > 0 else "channel"
        return self.strategy or by_size

    def describe(self) -> str:
        """The settings in a few words."""
        size = f" of {self.group_size}" if self.scheme == "group" else ""
        return f"{self.type}{self.num_bits} by {self.scheme}{size}{'' if self.symmetric else ', asymmetric'}"

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        sizes = {"tensor": shape, "channel": (1, shape[1]), "group": (1, self.group_size or 1)}
        rows, columns = self.block_structure or shape if self.scheme == "block" else sizes[self.scheme]
        return max(rows, 1), max(columns, 1)


class _Group(msgspec.Struct, frozen=True):
    """Modules that are quantised alike."""

    targets: list[str]
    weights: _Weights | None = None
    format: str | None = None


class CompressedTensors(msgspec.Struct, frozen=True):
    """The settings of `quant_method: "compressed-tensors"`."""

    endings: ClassVar[Mapping[str, str]] = {
        f".weight_{part}": ".weight" for part in ("packed", "scale", "zero_point", "shape", "g_idx")
    }
    unused: ClassVar[str] = r"\.((input|output|[qkv])_(scale|zero_point)|input_global_scale)$"

    config_groups: dict[str, _Group]
    format: str
    quantization_status: Literal["compressed"] = "compressed"
    sparsity_config: dict[str, object] | None = None
    transform_config: dict[str, object] | None = None

    def __post_init__(self) -> None:
        for group in self.config_groups.values():
            if group.weights is not None and (group.format or self.format) not in _READ:
                raise ValueError(f"format {group.format or self.format!r} is not one of {', '.join(_READ)}")
        if (self.sparsity_config or {}).get("format", "dense") != "dense":
            raise ValueError(f"sparsity_config has the format {(self.sparsity_config or {})['format']!r}, not 'dense'")
        if (self.transform_config or {}).get("config_groups"):
            raise ValueError("transform_config rotates activations, which is not served")

    def describe(self) -> str:
        kinds = {
            f"{group.format or self.format}: {group.weights.describe()}"
            for group in self.config_groups.values()
            if group.weights is not None
        }
        return f"compressed-tensors ({'; '.join(sorted(kinds))})"

    def recipe(self, parts: StoredParts) -> Recipe:
        group = self._group_of(parts)
        weights = group.weights
        assert weights is not None, "only groups with weights are looked for"
        is_packed = (group.format or self.format) == _PACKED
        if is_packed and weights.type == "float":
            raise parts.refusal("its format is 'pack-quantized', and its type is float")
        codes, shape = self._unpack_codes(parts, weights) if is_packed else self._plain(parts, weights)
        block = weights.block(shape)
        count = ceil_div(shape[0], block[0]), ceil_div(shape[1], block[1])
        shapes: list[tuple[int, ...]] = [count, (), (1,)] if weights.scheme == "tensor" else [count]
        scales = parts.take(".weight_scale", FLOATS, shapes)
        others = [self._zero_points(parts, weights, shapes, count, is_packed)] if ".weight_zero_point" in parts else []
        if not weights.symmetric and not others:
            parts.take(".weight_zero_point", ("I8", "I32"))
        if ".weight_g_idx" in parts:
            others.append(parts.take(".weight_g_idx", ("I32", "I64"), [(shape[1],)]))
            if weights.scheme != "group":
                raise parts.refusal("it has a weight_g_idx, and its strategy is not 'group'")
        kinds = [tensor.name.rpartition(".")[2] for tensor in others]

        def compute(codes: Tensor, scales: Tensor, *others: Tensor) -> Tensor:
            given = dict(zip(kinds, others, strict=True))
            zeros, groups = given.get("weight_zero_point"), given.get("weight_g_idx")
            if zeros is not None and zeros.dtype == torch.int32:
                zeros = unpack(zeros.t(), weights.num_bits, shape[0]).t().short() - 2 ** (weights.num_bits - 1)
            if zeros is not None and weights.symmetric and bool(zeros.any()):
                raise parts.refusal("its zero points are not zero, though config.json has symmetric true")
            if is_packed:
                codes = unpack(codes, weights.num_bits, shape[1]).short() - 2 ** (weights.num_bits - 1)
            if groups is not None and not bool((groups == -1).all()):
                _check_groups(parts, groups, count[1])
                scales = scales[:, groups.long()]
                zeros = None if zeros is None else zeros[:, groups.long()]
                return dequantise(codes, scales, zeros, (1, 1))
            return dequantise(codes, scales, zeros, block)

        return Recipe(shape, [codes, scales, *others], compute)

    def _group_of(self, parts: StoredParts) -> _Group:
        """The group whose targets name the weight's module; or, as a class such as "Linear", may."""
        groups = [group for group in self.config_groups.values() if group.weights is not None]
        module = parts.name.removesuffix(".weight")
        for is_named in (
            lambda target: target == module,
            lambda target: target.startswith("re:") and _matches(target[3:], module),
            lambda target: target.isidentifier(),
        ):
            found = [group for group in groups if any(map(is_named, group.targets))]
            if any((group.weights, group.format) != (found[0].weights, found[0].format) for group in found[1:]):
                raise parts.refusal("config.json has several config_groups for it, with different settings")
            if found:
                return found[0]
        raise parts.refusal("config.json has no config_groups entry for it")

    def _unpack_codes(self, parts: StoredParts, weights: _Weights) -> tuple[StoredTensor, tuple[int, int]]:
        """The packed codes, and the shape of the weight."""
        stored = parts.take(".weight_shape", ("I32", "I64"), [(2,)])
        rows, columns = (int(size) for size in stored.materialize())
        if min(rows, columns) < 0 or max(rows, columns) >= 2**31:
            raise parts.refusal(f"'{stored.name}' holds {[rows, columns]}", stored)
        packed = parts.take(".weight_packed", ("I32",), [(rows, ceil_div(columns * weights.num_bits, 32))])
        return packed, (rows, columns)

    def _plain(self, parts: StoredParts, weights: _Weights) -> tuple[StoredTensor, tuple[int, int]]:
        """The codes, each in an element of its own, and their shape."""
        codes = parts.take("", ("F8_E4M3" if weights.type == "float" else "I8",), num_dims=2)
        return codes, (codes.shape[0], codes.shape[1])

    def _zero_points(
        self,
        parts: StoredParts,
        weights: _Weights,
        shapes: list[tuple[int, ...]],
        count: tuple[int, int],
        is_packed: bool,
    ) -> StoredTensor:
        """Those of the scales: each in an element of its own, or packed along the rows (int32)."""
        tensor = parts.take(".weight_zero_point", ("I8", "I32"))
        if tensor.stored_dtype == "I32" and is_packed and weights.scheme in ("group", "channel"):
            return parts.take(".weight_zero_point", ("I32",), [(ceil_div(count[0] * weights.num_bits, 32), count[1])])
        return parts.take(".weight_zero_point", ("I8",), shapes)


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except re.error:
        return False


def _check_groups(parts: StoredParts, groups: Tensor, num_groups: int) -> None:
    if not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
        raise parts.refusal(f"weight_g_idx names groups beyond the {num_groups} that there are")


def dequantise(codes: Tensor, scales: Tensor, zeros: Tensor | None, block: tuple[int, int]) -> Tensor:
    """Codes [O, I] and, for each block of `block` or one for all, scales and zero points -> float32 [O, I]."""
    shape, values = tuple(codes.shape), codes.float()
    if zeros is not None:
        values = values.sub_(spread(zeros.reshape(1, 1) if zeros.dim() < 2 else zeros, shape, block))
    return values.mul_(spread(scales.reshape(1, 1) if scales.dim() < 2 else scales, shape, block))
