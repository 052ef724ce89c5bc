"""AWQ in the layout "gemm": 4-bit integers with a scale and a zero point for each group of inputs.

Source: AutoAWQ, `awq/modules/linear/gemm.py` (`WQLinear_GEMM.from_linear`) and `awq/utils/packing_utils.py`.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec
from torch import Tensor

from sync.quantised.numbers import ceil_div, spread, unpack
from sync.quantised.tensors import FLOATS, Recipe, StoredParts

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place of column i of eight within their word, from its lowest bits."""


class Awq(msgspec.Struct, frozen=True):
    """The settings of `quant_method: "awq"`."""

    endings: ClassVar[Mapping[str, str]] = {f".{part}": ".weight" for part in ("qweight", "qzeros", "scales")}
    unused: ClassVar[str] = r"(?!)"

    bits: Literal[4] = 4
    group_size: int = 128
    zero_point: bool = True
    version: Literal["gemm", "GEMM"] = "gemm"
    format: Literal["gemm", "GEMM"] = "gemm"
    backend: Literal["autoawq", "auto"] | None = None

    def __post_init__(self) -> None:
        if self.group_size != -1 and self.group_size < 1:
            raise ValueError(f"group_size {self.group_size} is neither -1 nor 1 or more")
        if not self.zero_point:
            raise ValueError("zero_point is false: the layout 'gemm' has zero points")

    def describe(self) -> str:
        groups = "all inputs" if self.group_size == -1 else f"{self.group_size} inputs"
        return f"AWQ (gemm), 4 bits, a scale and a zero point for each {groups}"

    def recipe(self, parts: StoredParts) -> Recipe:
        codes = parts.take(".qweight", ("I32",), num_dims=2)
        num_in, num_out = codes.shape[0], codes.shape[1] * 8
        size = num_in if self.group_size == -1 else self.group_size
        num_groups = ceil_div(num_in, max(size, 1))
        zeros = parts.take(".qzeros", ("I32",), [(num_groups, num_out // 8)])
        scales = parts.take(".scales", FLOATS, [(num_groups, num_out)])

        def compute(codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
            return dequantise(codes, zeros, scales, size)

        return Recipe((num_out, num_in), [codes, zeros, scales], compute)


def dequantise(codes: Tensor, zeros: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """int32 [I, O / 8], int32 [I / group_size, O / 8], floats [I / group_size, O] -> float32 [O, I].

    With g = i // group_size, w[o, i] = scales[g, o] * (code[i, o] - zero[g, o]).
    """
    values, points = _in_order(codes).float(), _in_order(zeros)
    shape, block = tuple(values.shape), (group_size, 1)
    return values.sub_(spread(points, shape, block)).mul_(spread(scales, shape, block)).t().contiguous()


def _in_order(words: Tensor) -> Tensor:
    """int32 [N, O / 8] -> uint8 [N, O]: the columns of each word in their own order."""
    columns = unpack(words, 4, words.shape[1] * 8)
    return columns.view(*words.shape, 8)[..., _PLACES].flatten(-2)
