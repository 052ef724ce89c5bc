"""The products around attention over latents on a device. Twin: `kernels.latent`.

Each head multiplies its rows by its own part of one matrix, in tiles as `matmul` does: a row's bits depend on neither
the number of rows nor the number of heads.
"""

import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.triton.launches import Launcher
from rollout_engine.kernels.triton.matmul import sum_products, tile_for
from rollout_engine.kernels.triton.rounding import narrow


def absorb(q: Tensor, weight: Tensor, nope: int) -> Tensor:
    """q [T, H, N + P] and `weight` [H, N + V, R] -> [T, H, R + P]: see `kernels.latent.absorb`; without gradients."""
    rank, q = weight.shape[2], q if q.stride(2) == 1 else q.contiguous()
    out = q.new_empty(*q.shape[:2], rank + q.shape[2] - nope)
    _multiply(q[..., :nope], weight[:, :nope].mT, out[..., :rank])
    out[..., rank:] = q[..., nope:]
    return out


def expand(x: Tensor, weight: Tensor, nope: int) -> Tensor:
    """x [T, H, R] and `weight` [H, N + V, R] -> [T, H, V]: see `kernels.latent.expand`; without gradients."""
    out = x.new_empty(*x.shape[:2], weight.shape[1] - nope)
    _multiply(x if x.stride(2) == 1 else x.contiguous(), weight[:, nope:], out)
    return out


def _multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write x [T, H, K] @ weight[h].T of each head into `out` [T, H, O]; `weight` [H, O, K], all of one dtype."""
    (num_rows, num_heads, in_features), out_features = x.shape, weight.shape[1]
    if weight.shape != (num_heads, out_features, in_features) or not x.dtype == weight.dtype == out.dtype:
        sizes = f"x {x.dtype} {list(x.shape)} and weights {weight.dtype} {list(weight.shape)}"
        raise ValueError(f"Latents should meet weights of their heads, channels and dtype, not {sizes}.")
    if x.stride(2) != 1 or 1 not in weight.stride()[1:]:
        raise ValueError(f"Rows should be contiguous, got strides {x.stride()} and {weight.stride()}.")
    if not num_rows:
        return
    tile = tile_for(out_features, in_features, weight.dtype)
    tiles = -(-num_rows // tile.block_m) * -(-out_features // tile.block_n)
    _by_head.launch(
        (tiles, num_heads),
        (x, weight, out),
        (num_rows,),
        (
            *(*x.stride()[:2], *weight.stride(), *out.stride()[:2], out_features, in_features),
            *(in_features % tile.block_k == 0, *tile[:3]),
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _by_head_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    x_stride,
    x_head,
    weight_head,
    WEIGHT_N: tl.constexpr,
    WEIGHT_K: tl.constexpr,
    out_stride,
    out_head,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_n: tl.constexpr = (OUT_FEATURES + BLOCK_N - 1) // BLOCK_N
    tile_m, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    head = tl.program_id(1).to(tl.int64)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Past the end the last row or column is read again and not written, so loads need no mask.
    x = x_ptr + head * x_head + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    weight = weight_ptr + head * weight_head + tl.minimum(column, OUT_FEATURES - 1)[None, :] * WEIGHT_N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = sum_products(x, weight + k[:, None] * WEIGHT_K, total, IN_FEATURES, IS_EVEN, BLOCK_K, WEIGHT_K)
    place = out_ptr + head * out_head + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    mask = (row < num_rows)[:, None] & (column < OUT_FEATURES)[None, :]
    tl.store(place, narrow(total, out_ptr.dtype.element_ty), mask=mask)


_by_head = Launcher(_by_head_kernel)
