"""Products of many experts with the rows that were sent to each, in one launch, and the sum of a token's outputs.

    experts [T, k] ── group ── the T * k entries sorted by expert ── multiply ... ── add_weighted ── [T, H]

An entry is one expert of one token; entry i is expert i % k of token i // k. How many entries an expert has is known to
the device alone: nothing waits for it, so graphs may capture all of this. A row's bits do not depend on the others:
each output is sum_products over K in order as in `matmul`, by the tile of the expert's weight.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.triton.launches import Launcher
from rollout_engine.kernels.triton.matmul import sum_products, tile_for
from rollout_engine.kernels.triton.rounding import narrow, rounded
from rollout_engine.kernels.triton.tiling import next_power_of_2

_ENTRIES = 1024
"""Entries that a program looks at together, to sort them."""
_COLUMNS = 2048


class Groups(NamedTuple):
    """The N entries of T tokens, sorted by expert."""

    order: Tensor
    """int32 [N], entry at each place."""
    starts: Tensor
    """int32 [E + 1], the first place of each expert, then the end of the last."""

    def part(self, experts: slice) -> "Groups":
        """The groups of consecutive experts, at the same places."""
        return Groups(self.order, self.starts[experts.start : experts.stop + 1])

    @classmethod
    def of(cls, experts: Tensor, num_experts: int) -> "Groups":
        """The groups of the experts int32 [T, k] of each token, contiguous."""
        if not experts.is_contiguous():
            raise ValueError(f"Experts should be contiguous, got strides {experts.stride()}.")
        groups = cls(experts.new_empty(experts.numel()), experts.new_empty(num_experts + 1))
        _group.launch((num_experts + 1,), (experts, *groups), (experts.numel(),), (num_experts, _ENTRIES))
        return groups


def multiply(
    x: Tensor, weight: Tensor, groups: Groups, out: Tensor, *, top_k: int = 0, by_entry: bool = False
) -> Tensor:
    """Write x @ weight[e].T of each expert's rows into `out` [N, O], all of one dtype: as `matmul`, bit for bit.

    Args:
        x: [N, K] in the order of the places, or with `top_k` [T, K]; any stride between rows.
        weight: [E, O, K], contiguous, or a view of one that is [E, K, O].
        groups: of E experts; if they do not have all N entries, other rows of `out` are not written.
        out: in the order of the places, or of the entries.
        top_k: k, if an entry's row is that of its token.
        by_entry: whether `out` is in the order of the entries.
    """
    num_experts, out_features, in_features = weight.shape
    is_transposed = not weight.is_contiguous()
    if not (x.stride(1) == out.stride(1) == 1 and (weight.mT if is_transposed else weight).is_contiguous()):
        raise ValueError(f"Rows should be contiguous, got strides {x.stride()}, {weight.stride()}, {out.stride()}.")
    if not x.dtype == weight.dtype == out.dtype:
        raise ValueError(f"Dtypes should be equal, got {x.dtype} @ {weight.dtype} -> {out.dtype}.")
    if not (num_entries := len(groups.order)):
        return out
    tile = tile_for(out_features, in_features, weight.dtype)
    # Of each expert's tiles but the last, all are full.
    num_tiles = min(num_entries, num_entries // tile.block_m + num_experts)
    _multiply.launch(
        (num_tiles * -(-out_features // tile.block_n),),
        (x, weight, out, *groups),
        (),
        (
            *(x.stride(0), out.stride(0), num_experts, out_features, in_features, is_transposed),
            *(top_k, by_entry, in_features % tile.block_k == 0, next_power_of_2(num_experts), *tile[:3]),
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def add_weighted(outputs: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Write the sum of weights [T, k] times outputs [T, k, H] over k into `out` [T, H]; rounded after each step.

    Outputs and `out` have one dtype, and contiguous rows; `weights` may be float32.
    """
    num_tokens, top_k, size = outputs.shape
    if not (outputs.is_contiguous() and weights.is_contiguous() and out.stride(1) == 1):
        raise ValueError(f"All should be contiguous, got {outputs.stride()}, {weights.stride()}, {out.stride()}.")
    if num_tokens:
        grid = num_tokens, -(-size // _COLUMNS)
        _add.launch(grid, (outputs, weights, out), (), (out.stride(0), size, top_k, _COLUMNS))
    return out


@triton.jit(do_not_specialize=["num_entries"])
def _group_kernel(experts_ptr, order_ptr, starts_ptr, num_entries, NUM_EXPERTS: tl.constexpr, ENTRIES: tl.constexpr):
    """Program e finds the entries of expert e, and the number of entries before them."""
    own = tl.program_id(0)
    lane = tl.arange(0, ENTRIES)
    before = tl.zeros((ENTRIES,), tl.int32)
    for start in range(0, num_entries, ENTRIES):
        expert = tl.load(experts_ptr + start + lane, mask=start + lane < num_entries, other=NUM_EXPERTS)
        before += (expert < own).to(tl.int32)
    place = tl.sum(before)
    tl.store(starts_ptr + own, place)
    if own == NUM_EXPERTS:
        return
    for start in range(0, num_entries, ENTRIES):
        expert = tl.load(experts_ptr + start + lane, mask=start + lane < num_entries, other=NUM_EXPERTS)
        is_own = (expert == own).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(is_own) - 1, start + lane, mask=expert == own)
        place += tl.sum(is_own)


@triton.jit
def _multiply_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    order_ptr,
    starts_ptr,
    x_stride,
    out_stride,
    NUM_EXPERTS: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    TOP_K: tl.constexpr,
    BY_ENTRY: tl.constexpr,
    IS_EVEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_n: tl.constexpr = (OUT_FEATURES + BLOCK_N - 1) // BLOCK_N
    tile_m, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    # The expert whose rows are in this tile: those before it have fewer tiles than that, all together.
    each = tl.arange(0, EXPERTS)
    first = tl.load(starts_ptr + each, mask=each < NUM_EXPERTS, other=0)
    tiles = tl.cdiv(tl.load(starts_ptr + each + 1, mask=each < NUM_EXPERTS, other=0) - first, BLOCK_M)
    is_before = tl.cumsum(tiles) <= tile_m
    expert = tl.sum(is_before.to(tl.int32))
    if expert >= NUM_EXPERTS:
        return
    tile_m -= tl.sum(tl.where(is_before, tiles, 0))
    end = tl.load(starts_ptr + expert + 1)
    place = tl.load(starts_ptr + expert) + tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = place < end
    place = tl.minimum(place, end - 1)  # past the end the last row is read again, and not written
    if TOP_K or BY_ENTRY:
        entry = tl.load(order_ptr + place)
    row = entry // TOP_K if TOP_K else place
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    weight_n: tl.constexpr = 1 if IS_TRANSPOSED else IN_FEATURES
    weight_k: tl.constexpr = OUT_FEATURES if IS_TRANSPOSED else 1
    start = (
        expert.to(tl.int64) * OUT_FEATURES * IN_FEATURES + tl.minimum(column, OUT_FEATURES - 1).to(tl.int64) * weight_n
    )
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_ptrs = weight_ptr + start[None, :] + k[:, None] * weight_k
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = sum_products(x_ptrs, weight_ptrs, total, IN_FEATURES, IS_EVEN, BLOCK_K, weight_k)
    out_row = entry if BY_ENTRY else place
    out = out_ptr + out_row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(out, narrow(total, out_ptr.dtype.element_ty), mask=is_row[:, None] & (column < OUT_FEATURES)[None, :])


@triton.jit
def _add_kernel(
    outputs_ptr, weights_ptr, out_ptr, out_stride, SIZE: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZE
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros((COLUMNS,), tl.float32)
    for slot in tl.static_range(TOP_K):
        entry = token * TOP_K + slot
        output = tl.load(outputs_ptr + entry * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        part = rounded(output * tl.load(weights_ptr + entry).to(tl.float32), dtype)
        total = part if slot == 0 else rounded(total + part, dtype)
    tl.store(out_ptr + token * out_stride + column, narrow(total, dtype), mask=inside)


_group = Launcher(_group_kernel)
_multiply = Launcher(_multiply_kernel)
_add = Launcher(_add_kernel, enable_fp_fusion=False)  # a product is rounded before it is added, as modules do
