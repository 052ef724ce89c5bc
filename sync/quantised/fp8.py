"""8-bit floats with a scale for each block, row or weight, as DeepSeek-V3, Qwen3 (FP8) and Ministral 3 are published.

Source: DeepSeek-V3's `inference/kernel.py`, `weight_dequant`: y = x * s, one s for each 128 x 128 block of x; and for
the names transformers' `integrations/finegrained_fp8.py`.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec
from torch import Tensor

from sync.quantised.numbers import ceil_div, spread
from sync.quantised.tensors import FLOATS, Recipe, StoredParts


class Fp8(msgspec.Struct, frozen=True):
    """The settings of `quant_method: "fp8"`."""

    endings: ClassVar[Mapping[str, str]] = {"_scale_inv": "", ".weight_scale": ".weight"}
    unused: ClassVar[str] = r"\.(activation_scale|input_scale|output_scale|[qkv]_scale)$"

    weight_block_size: tuple[int, int] | None = None
    activation_scheme: str = "dynamic"
    fmt: Literal["e4m3", "float8_e4m3fn"] = "e4m3"
    scale_fmt: Literal["float", "ue8m0"] = "float"
    expert_dtype: Literal["fp8"] = "fp8"

    def __post_init__(self) -> None:
        if self.weight_block_size is not None and min(self.weight_block_size) < 1:
            raise ValueError(f"weight_block_size {list(self.weight_block_size)} has a size below 1")

    def describe(self) -> str:
        block = self.weight_block_size
        blocks = (
            "a scale for each weight or row" if block is None else f"a scale for each {block[0]} x {block[1]} block"
        )
        return f"fp8 (e4m3), {blocks}"

    def recipe(self, parts: StoredParts) -> Recipe:
        weight = parts.take("", ("F8_E4M3",))
        shape = weight.shape
        if len(shape) < 2:
            raise parts.refusal(f"'{weight.name}' is {list(shape)}: expected a matrix", weight)
        scale_name = "_scale_inv" if "_scale_inv" in parts else ".weight_scale"
        block = self.weight_block_size or (1, shape[-1])
        shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (shape[-2], 1)]
        if self.weight_block_size is not None:
            shapes = [(*shape[:-2], ceil_div(shape[-2], block[0]), ceil_div(shape[-1], block[1]))]
        scale = parts.take(scale_name, (*FLOATS, "F8_E8M0"), shapes)

        def compute(values: Tensor, scales: Tensor) -> Tensor:
            return dequantise(values, scales, block)

        return Recipe(shape, [weight, scale], compute)


def dequantise(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """float8 [..., O, I] and floats of blocks of `block`, or one for all -> float32 [..., O, I]: their products."""
    shape = tuple(values.shape)
    if scales.dim() < 2:
        scales = scales.reshape(1, 1)
    return values.float().mul_(spread(scales, shape, block))
