"""Batch-invariant matrix products with a weight, for deterministic mode.

The tile depends on the weight's shape and dtype alone, not on the number of rows; each output is accumulated over K in
order, BLOCK_K at a time, in float32, and rounded once after the bias. A row's place in a tile does not change its bits.
Twin: `torch.nn.functional.linear`, which is not batch-invariant.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.triton.launches import Launcher
from rollout_engine.kernels.triton.rounding import INTERPRETED, narrow

_GROUP = 8
"""Row tiles launched next to each other, so that they find the same weight tiles in the L2 cache."""
_FILLED = 132
"""Multiprocessors of an H200: a decode step of few rows should have about as many column tiles."""


class Tile(NamedTuple):
    """Tile sizes of a product. They are part of the numerics: another tile may give other bits."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tile_for(out_features: int, in_features: int, dtype: torch.dtype) -> Tile:
    """The tile of every product with a weight of this shape and dtype, on any machine and with any number of rows."""
    if dtype == torch.float32:
        return Tile(64, 64, 32, 4, 3)
    if out_features >= 128 * _FILLED:
        return Tile(64, 128, 64, 4, 4)
    if out_features >= 64 * _FILLED // 2:
        return Tile(64, 64, 128, 4, 4)
    return Tile(64, 32, 128, 4, 4)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: Tile | None = None) -> Tensor:
    """Write x [M, K] @ weight.T + bias into `out` [M, N], all of one dtype: bfloat16, float16 or float32 (not TF32).

    Or with `out` in float32: the sums, which are not rounded then.

    `weight` [N, K], `bias` [N]; any stride between rows. `tile` replaces `tile_for`'s: a slice of a weight's rows with
    the tile of the whole weight gives the same bits.
    """
    (rows, in_features), out_features = x.shape, weight.shape[0]
    if not x.stride(1) == weight.stride(1) == out.stride(1) == 1:
        raise ValueError(f"Rows should be contiguous, got strides {x.stride()}, {weight.stride()}, {out.stride()}.")
    if x.dtype != weight.dtype or out.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"Dtypes should be equal, got {x.dtype} @ {weight.dtype} -> {out.dtype}.")
    if rows == 0:
        return out
    tile = tile or tile_for(out_features, in_features, weight.dtype)
    tiles = -(-rows // tile.block_m) * -(-out_features // tile.block_n)
    has_bias, is_even = bias is not None, in_features % tile.block_k == 0
    _matmul.launch(
        (tiles,),
        (x, weight, weight if bias is None else bias, out),
        (rows,),
        (
            *(x.stride(0), weight.stride(0), out.stride(0), out_features, in_features),
            *(has_bias, is_even, *tile[:3], _GROUP),
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _matmul_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    x_stride,
    weight_stride,
    out_stride,
    out_features,
    in_features,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile_m, tile_n = _tile_of(tl.program_id(0), num_rows, out_features, BLOCK_M, BLOCK_N, GROUP)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Past the end the last row or column is read again and not written, so loads need no mask.
    x_ptrs = x_ptr + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_ptrs = weight_ptr + tl.minimum(column, out_features - 1).to(tl.int64)[None, :] * weight_stride + k[:, None]
    total = sum_products(x_ptrs, weight_ptrs, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), in_features, IS_EVEN, BLOCK_K)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=column < out_features, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    mask = (row < num_rows)[:, None] & (column < out_features)[None, :]
    tl.store(place, narrow(total, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_products(
    x_ptrs, weight_ptrs, total, in_features, IS_EVEN: tl.constexpr, BLOCK_K: tl.constexpr, WEIGHT_K: tl.constexpr = 1
):
    """`total` and the product of a tile of rows [M, BLOCK_K] and one of columns [BLOCK_K, N], over K in order.

    WEIGHT_K: the weight's stride over K.
    """
    k = tl.arange(0, BLOCK_K)
    for start in range(0, in_features, BLOCK_K):
        if IS_EVEN:
            x, weight = tl.load(x_ptrs), tl.load(weight_ptrs)
        else:
            inside = k < in_features - start
            x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
            weight = tl.load(weight_ptrs, mask=inside[:, None], other=0.0)
        if INTERPRETED:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(x, weight, total, input_precision="ieee")
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K * WEIGHT_K
    return total


@triton.jit
def _tile_of(program, num_rows, out_features, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Tile of a program: down GROUP row tiles, then to the next column of tiles."""
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(out_features, BLOCK_N)
    first = program // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    inside = program % (GROUP * tiles_n)
    return first + inside % height, inside // height


_matmul = Launcher(_matmul_kernel)
