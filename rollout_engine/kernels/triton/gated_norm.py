"""RMSNorm with a gate, and rows of length one, on a device; a row has the same bits in any batch.

Twins: `kernels.norm.gated_rms_norm` and `kernels.recurrence.l2_normalised`. The compiler sees no alignment: a single
row of a wider buffer is read in place, and would else be summed by other code than the same row among others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.triton.launches import Launcher
from rollout_engine.kernels.triton.rounding import narrow, rounded
from rollout_engine.kernels.triton.tiling import next_power_of_2

_TILE = 2048
"""Elements per program, for rows shorter than this."""


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    epsilon: float,
    *,
    group_size: int,
    gate_first: bool,
    is_sigmoid: bool,
    rounds_norm: bool,
) -> Tensor:
    """A tensor like x [..., D]: see `kernels.norm.gated_rms_norm`, which has checked the arguments."""
    x, gate, weight = x.contiguous(), gate.contiguous(), weight.contiguous()
    out, block = torch.empty_like(x), next_power_of_2(group_size)
    num_rows, rows_at_once = x.numel() // group_size, max(1, _TILE // block)  # of the row's size alone
    if num_rows:
        _gated_norm.launch(
            (-(-num_rows // rows_at_once),),
            (x, gate, weight, out),
            (num_rows,),
            (
                *(x.shape[-1] // group_size, epsilon, group_size),
                *(gate_first, is_sigmoid, rounds_norm, rows_at_once, block),
            ),
            num_warps=4 if block <= 4096 else 8,
        )
    return out


def l2_normalise(x: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(sum(x^2) + epsilon) over the last dimension, float32."""
    x, size = x.contiguous(), x.shape[-1]
    out, block = torch.empty_like(x, dtype=torch.float32), next_power_of_2(size)
    num_rows, rows_at_once = x.numel() // max(size, 1), max(1, _TILE // block)
    if num_rows:
        grid = (-(-num_rows // rows_at_once),)
        _l2.launch(grid, (x, out), (num_rows,), (epsilon, size, rows_at_once, block), num_warps=4)
    return out


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["x_ptr", "gate_ptr", "weight_ptr", "out_ptr"]
)
def _gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    GROUPS: tl.constexpr,
    epsilon,
    SIZE: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    ROUNDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    place = row[:, None] * SIZE + column[None, :]
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + place, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + (row % GROUPS)[:, None] * SIZE + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if IS_SIGMOID:
        factor = 1.0 / (1.0 + tl.exp(-gate))
    else:
        factor = gate / (1.0 + tl.exp(-gate))
    if GATE_FIRST:
        x = x * factor
    normal = x * (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / SIZE + epsilon))[:, None]
    if ROUNDS:
        normal = rounded(normal, dtype)
    result = weight * normal
    if ROUNDS:
        result = rounded(result, dtype)
    if not GATE_FIRST:
        result = result * factor
    tl.store(out_ptr + place, narrow(result, dtype), mask=mask)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["x_ptr", "out_ptr"])
def _l2_kernel(x_ptr, out_ptr, num_rows, epsilon, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    place = row[:, None] * SIZE + column[None, :]
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) + epsilon)
    tl.store(out_ptr + place, x * scale[:, None], mask=mask)


_gated_norm = Launcher(_gated_norm_kernel, enable_fp_fusion=False)
_l2 = Launcher(_l2_kernel, enable_fp_fusion=False)
