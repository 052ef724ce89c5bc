"""RMSNorm, alone or after a residual addition; a row has the same bits in any batch. Twins: `kernels.norm`."""

import math

import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.triton.launches import Launcher
from rollout_engine.kernels.triton.rounding import narrow, rounded
from rollout_engine.kernels.triton.tiling import next_power_of_2

_TILE = 2048
"""Elements per program, for rows shorter than this."""


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, out: Tensor, *, has_offset: bool = False) -> Tensor:
    """Write weight * round(x / sqrt(mean(x^2) + epsilon)) into `out`, over the last of at most three dimensions.

    With `has_offset` the weight is 1 + weight, and only the result is rounded. Rows are contiguous, other strides are
    free. `out` may be `x`.
    """
    return _run(x, None, weight, epsilon, out, has_offset)


def add_rms_norm(
    residual: Tensor, delta: Tensor, weight: Tensor, epsilon: float, out: Tensor, *, has_offset: bool = False
) -> Tensor:
    """Set `residual` [R, D] to round(residual + delta), and `out` to its `rms_norm`, bit for bit; it may be `delta`."""
    return _run(residual, delta, weight, epsilon, out, has_offset)


def _run(x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, out: Tensor, has_offset: bool) -> Tensor:
    (*outer, size), strides = x.shape, tuple(_strides(one) for one in (x, x if delta is None else delta, out))
    num_rows, inner = math.prod(outer), outer[-1] if outer else 1
    block = next_power_of_2(size)
    rows_at_once = max(1, _TILE // block)  # of the row's size alone: another tile could sum in another order
    if num_rows:
        _norm.launch(
            (-(-num_rows // rows_at_once),),
            (x, x if delta is None else delta, out, weight),
            (num_rows, inner),
            (*strides, epsilon, size, delta is not None, has_offset, rows_at_once, block),
            num_warps=4 if block <= 4096 else 8,
        )
    return out


def _strides(x: Tensor) -> tuple[int, int]:
    """Strides of the last dimensions but one, 0 if there are fewer."""
    *outer, one = x.stride()
    if len(outer) > 2 or one != 1:
        raise ValueError(f"Expected contiguous rows, at most 3 dimensions, got {list(x.shape)}, strides {x.stride()}.")
    row, outer_row = (0, 0, *outer)[-2:]
    return row, outer_row


@triton.jit(do_not_specialize=["num_rows", "inner"])
def _norm_kernel(
    x_ptr,
    delta_ptr,
    out_ptr,
    weight_ptr,
    num_rows,
    inner,
    x_strides,
    delta_strides,
    out_strides,
    epsilon,
    SIZE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    i, j = (row // inner)[:, None], (row % inner)[:, None]
    place = x_ptr + i * x_strides[0] + j * x_strides[1] + column[None, :]
    dtype = x_ptr.dtype.element_ty
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + i * delta_strides[0] + j * delta_strides[1] + column[None, :], mask=mask, other=0.0)
        x = rounded(x + delta.to(tl.float32), dtype)
        tl.store(place, narrow(x, dtype), mask=mask)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / SIZE + epsilon)
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        result = (1.0 + weight)[None, :] * (x * scale[:, None])
    else:
        result = weight[None, :] * rounded(x * scale[:, None], dtype)
    tl.store(out_ptr + i * out_strides[0] + j * out_strides[1] + column[None, :], narrow(result, dtype), mask=mask)


_norm = Launcher(_norm_kernel, enable_fp_fusion=False)  # with and without a sum before it, a row has the same bits
