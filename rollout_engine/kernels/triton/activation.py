"""Gated activation, activation(gate) * up, in one pass. Twin: `kernels.activation`."""

import math
from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.triton.launches import Launcher
from rollout_engine.kernels.triton.rounding import narrow, rounded

Activation = Literal["silu", "gelu_tanh"]

_COLUMNS = 2048
_SLOPE = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi))
_CUBE = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi) * 0.044715)


def gated(gate: Tensor, up: Tensor, out: Tensor, activation: Activation = "silu") -> Tensor:
    """Write activation(gate) * up into `out`, in float32, rounded after each of the two; all [R, D], rows contiguous.

    Bits do not depend on an element's place. `gate` and `up` may be halves of one buffer; `out` may be either.
    """
    rows, size = gate.shape
    if not gate.stride(1) == up.stride(1) == out.stride(1) == 1:
        raise ValueError(f"Rows should be contiguous, got strides {gate.stride()}, {up.stride()}, {out.stride()}.")
    if rows:
        grid = (rows, -(-size // _COLUMNS))
        strides = gate.stride(0), up.stride(0), out.stride(0)
        _gated.launch(grid, (gate, up, out), (), (*strides, size, activation == "silu", _COLUMNS))
    return out


@triton.jit
def _gated_kernel(
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, out_stride, size, IS_SILU: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    power = -gate if IS_SILU else (gate * gate * -_CUBE - _SLOPE) * gate
    dtype = out_ptr.dtype.element_ty
    activated = rounded(gate / (1.0 + tl.exp(power)), dtype)
    tl.store(out_ptr + row * out_stride + column, narrow(activated * up, dtype), mask=inside)


_gated = Launcher(_gated_kernel)
