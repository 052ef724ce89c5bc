"""MXFP4 experts, as gpt-oss is published: 4-bit floats, each 32 of them with a power of two as scale.

Source: OCP Microscaling Formats (MX) specification 1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0); openai/gpt-oss,
`gpt_oss/torch/weights.py`, for the layout.
"""

from collections.abc import Mapping
from typing import ClassVar

import msgspec
import torch
from torch import Tensor

from sync.quantised.tensors import Recipe, StoredParts

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = 32


class Mxfp4(msgspec.Struct, frozen=True):
    """The settings of `quant_method: "mxfp4"`: there are none that change values."""

    endings: ClassVar[Mapping[str, str]] = {"_blocks": "", "_scales": ""}
    unused: ClassVar[str] = r"(?!)"

    def describe(self) -> str:
        return "MXFP4, a power of two for each 32 values"

    def recipe(self, parts: StoredParts) -> Recipe:
        blocks = parts.take("_blocks", ("U8",), num_dims=4)
        num_experts, rows, groups, width = blocks.shape
        if width * 2 != _BLOCK:
            raise parts.refusal(f"'{blocks.name}' has {width} bytes for each block, expected {_BLOCK // 2}", blocks)
        scales = parts.take("_scales", ("U8",), [(num_experts, rows, groups)])
        return Recipe((num_experts, groups * _BLOCK, rows), [blocks, scales], dequantise)


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 [E, O, I / 32, 16] and uint8 [E, O, I / 32] -> float32 [E, I, O]: value * 2 ** (scale - 127).

    A byte has two values, in its low half the first. A value is sign, two bits of exponent and one of mantissa (E2M1):
    0, 0.5, 1, 1.5, 2, 3, 4 or 6, or the negative. Scale 255 is NaN. All products are exact.
    """
    table = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], dim=-1)  # [256, 2]
    powers = scales.view(torch.float8_e8m0fnu).float()
    num_experts, rows, groups, _ = blocks.shape
    out = torch.empty(num_experts, groups * _BLOCK, rows)
    for expert in range(num_experts):  # one at a time: indices take more memory than values
        values = pairs.index_select(0, blocks[expert].flatten().int()).view(rows, groups, _BLOCK)
        out[expert] = values.mul_(powers[expert][..., None]).view(rows, -1).t()
    return out
