"""GPTQ: integers of 2, 3, 4 or 8 bits, with a scale and a zero point for each group of inputs.

Source: AutoGPTQ, `nn_modules/qlinear/qlinear_cuda.py` (`pack`, `forward`), and GPTQModel: in its format "gptq" zero
points are stored minus one, in "gptq_v2" as they are.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from sync.quantised.numbers import ceil_div, unpack
from sync.quantised.tensors import FLOATS, Recipe, StoredParts


class Gptq(msgspec.Struct, frozen=True):
    """The settings of `quant_method: "gptq"`."""

    endings: ClassVar[Mapping[str, str]] = {f".{part}": ".weight" for part in ("qweight", "qzeros", "scales", "g_idx")}
    unused: ClassVar[str] = r"(?!)"

    bits: Literal[2, 3, 4, 8]
    group_size: int = 128
    desc_act: bool | None = None
    checkpoint_format: Literal["gptq", "gptq_v2"] | None = None
    format: Literal["gptq", "gptq_v2"] | None = None
    pack_dtype: Literal["int32"] = "int32"
    is_marlin_format: bool = False
    dynamic: dict[str, object] | None = None
    """Settings of single modules; those that begin with "-:" are not quantised."""

    def __post_init__(self) -> None:
        if self.group_size != -1 and self.group_size < 1:
            raise ValueError(f"group_size {self.group_size} is neither -1 nor 1 or more")
        if self.checkpoint_format and self.format and self.checkpoint_format != self.format:
            raise ValueError(f"checkpoint_format {self.checkpoint_format!r} is not format {self.format!r}")
        if self.is_marlin_format:
            raise ValueError("is_marlin_format is true: only the layout of GPTQ itself is read")
        if others := [name for name in self.dynamic or () if not name.startswith("-:")]:
            raise ValueError(f"dynamic has other settings for {others[0]!r}: only one for all modules is read")

    @property
    def zero_offset(self) -> int:
        """The difference of a zero point and its stored value."""
        return 0 if (self.checkpoint_format or self.format) == "gptq_v2" else 1

    def describe(self) -> str:
        groups = "all inputs" if self.group_size == -1 else f"{self.group_size} inputs"
        version = "as they are (v2)" if self.zero_offset == 0 else "minus one (v1)"
        order = ", inputs in any order (desc_act)" if self.desc_act else ""
        return f"GPTQ, {self.bits} bits, a scale for each {groups}{order}, zero points stored {version}"

    def recipe(self, parts: StoredParts) -> Recipe:
        codes = parts.take(".qweight", ("I32",), num_dims=2)
        words, num_out = codes.shape
        scales = parts.take(".scales", FLOATS, num_dims=2)
        num_groups = scales.shape[0]
        index = [parts.take(".g_idx", ("I32", "I64"), num_dims=1)] if ".g_idx" in parts else []
        num_in = index[0].shape[0] if index else words * 32 // self.bits
        size = num_in if self.group_size == -1 else self.group_size
        parts.take(".qweight", ("I32",), [(ceil_div(num_in * self.bits, 32), num_out)])
        parts.take(".scales", FLOATS, [(ceil_div(num_in, size), num_out)])
        zeros = parts.take(".qzeros", ("I32",), [(num_groups, ceil_div(num_out * self.bits, 32))])

        def compute(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None = None) -> Tensor:
            in_order = torch.arange(num_in) // max(size, 1)
            groups = in_order if groups is None else groups.long()
            self._check_groups(parts, groups, num_groups, in_order)
            if self.zero_offset and bool((unpack(zeros, self.bits, num_out) == 2**self.bits - 1).any()):
                raise parts.refusal(
                    f"a stored zero point is {2**self.bits - 1}: in format 'gptq' readers take it for 0, for "
                    f"{2**self.bits}, or carry into the next one. Convert the checkpoint to checkpoint_format 'gptq_v2'"
                )
            return dequantise(codes, zeros, scales, groups, self.bits, self.zero_offset)

        return Recipe((num_out, num_in), [codes, zeros, scales, *index], compute)

    def _check_groups(self, parts: StoredParts, groups: Tensor, num_groups: int, in_order: Tensor) -> None:
        """Raise unless every input has one of the groups, and they are in order if desc_act is false."""
        if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
            raise parts.refusal(f"g_idx names groups beyond the {num_groups} that there are")
        if self.desc_act is False and not torch.equal(groups, in_order):
            raise parts.refusal("config.json has desc_act false, and its g_idx does not have the inputs in order")


def dequantise(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor, bits: int, zero_offset: int) -> Tensor:
    """int32 [I * bits / 32, O], int32 [G, O * bits / 32], floats [G, O] and int64 [I] -> float32 [O, I].

    With g = groups[i], w[o, i] = scales[g, o] * (code[i, o] - (zero[g, o] + zero_offset)). Codes are packed along I,
    zeros along O.
    """
    num_out, num_in = codes.shape[1], len(groups)
    points = unpack(zeros, bits, num_out).t().float() + zero_offset  # [O, G]
    values = unpack(codes.t(), bits, num_in).float()  # [O, I]
    return values.sub_(points[:, groups]).mul_(scales.t().float()[:, groups])
