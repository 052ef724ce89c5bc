"""Rotary embedding (Su et al. 2021) and KV write in one pass, after the head norms of Qwen3 if there are any.

Rounds when the Hugging Face modules do, which are the twin: after the norm, after each product, after the sum.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.triton.launches import Launcher
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.rounding import narrow, rounded
from rollout_engine.kernels.triton.tiling import next_power_of_2

_HEADS = 8
"""Maximum of heads per program."""


class Rotary(NamedTuple):
    """Tables of cosines and sines, and how the elements of a head are paired."""

    cos: Tensor
    """[P, R] in the model's dtype: row p is for position p; R <= D elements of a head are rotated, the rest stay."""
    sin: Tensor
    """[P, R]."""
    is_interleaved: bool = False
    """Pairs are neighbours (2i, 2i + 1), as in GLM and Cohere; else (i, i + R / 2), as in Llama."""


class HeadNorms(NamedTuple):
    """RMSNorm of every query and key head before the rotation. Sums run by halves, so bits differ from `norm`'s."""

    q_weight: Tensor
    """[D]."""
    k_weight: Tensor
    """[D]."""
    epsilon: float


def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Tensor,
    rotary: Rotary,
    layer: KVLayer,
    q_out: Tensor,
    norms: HeadNorms | None = None,
) -> None:
    """Rotate q [T, H, D] into `q_out` (may be q), and write k [T, Hk, D], rotated, and v [T, Hk, Dv] to their slots.

    `positions` and `slots` are int64 [T]; slot -1 writes no KV (padding of a captured batch). Heads are contiguous,
    other strides are free.
    """
    tokens, heads, size = q.shape
    kv_heads = layer.num_kv_heads
    tensors = q, k, v, q_out, *layer
    tables = rotary.cos, rotary.sin
    strides = [x.stride() for x in (*tensors, *tables)]
    if any(stride[-1] != 1 for stride in strides):
        raise ValueError("The last dimension of q, k, v, q_out, the KV pool, cos and sin should be contiguous.")
    if tokens == 0:
        return
    at_once = min(_HEADS, next_power_of_2(min(heads, kv_heads)))
    rotated, value_size = rotary.cos.shape[1], v.shape[2]
    _rotary.launch(
        (tokens, -(-heads // at_once) - (-kv_heads // at_once)),
        (*tensors, positions, slots, *tables, *((q, q) if norms is None else norms[:2])),
        (),
        (
            *(stride[:-1] for stride in strides),
            0.0 if norms is None else norms.epsilon,
            *(heads, kv_heads, layer.block_size),
            (size, rotated, rotary.is_interleaved, norms is not None),
            *(value_size, at_once),
            *map(next_power_of_2, (rotated // 2, max(1, size - rotated), value_size)),
        ),
    )


@triton.jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    keys_ptr,
    values_ptr,
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_strides,
    k_strides,
    v_strides,
    q_out_strides,
    keys_strides,
    values_strides,
    cos_strides,
    sin_strides,
    epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    VALUES: tl.constexpr,
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + token)
    table = (cos_ptr + position * cos_strides[0], sin_ptr + position * sin_strides[0])
    q_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    if group < q_groups:
        head = (group * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        source = q_ptr + token * q_strides[0] + head * q_strides[1]
        target = q_out_ptr + token * q_out_strides[0] + head * q_out_strides[1]
        _rotate(source, target, head < NUM_HEADS, table, q_weight_ptr, epsilon, HEAD, HALF, REST)
    else:
        head = ((group - q_groups) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        slot = tl.load(slots_ptr + token)
        here = (head < NUM_KV_HEADS) & (slot >= 0)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        source = k_ptr + token * k_strides[0] + head * k_strides[1]
        target = keys_ptr + block * keys_strides[0] + head * keys_strides[1] + offset * keys_strides[2]
        _rotate(source, target, here, table, k_weight_ptr, epsilon, HEAD, HALF, REST)
        source = v_ptr + token * v_strides[0] + head * v_strides[1]
        target = values_ptr + block * values_strides[0] + head * values_strides[1] + offset * values_strides[2]
        column = tl.arange(0, VALUES)[None, :]
        mask = here[:, None] & (column < VALUE_SIZE)
        tl.store(target[:, None] + column, tl.load(source[:, None] + column, mask=mask), mask=mask)


@triton.jit
def _rotate(
    source, target, here, table, weight_ptr, epsilon, HEAD: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr
):
    """Norm and rotate the heads at `source` [HEADS] into `target`, which may be the same: all reads precede writes."""
    SIZE: tl.constexpr = HEAD[0]
    ROTATED: tl.constexpr = HEAD[1]
    IS_INTERLEAVED: tl.constexpr = HEAD[2]
    HAS_NORMS: tl.constexpr = HEAD[3]
    cos_ptr, sin_ptr = table
    dtype = source.dtype.element_ty
    pair = tl.arange(0, HALF)
    low = pair * 2 if IS_INTERLEAVED else pair
    high = low + 1 if IS_INTERLEAVED else pair + ROTATED // 2
    inside = pair < ROTATED // 2
    mask = here[:, None] & inside[None, :]
    x_low = tl.load(source[:, None] + low[None, :], mask=mask, other=0.0).to(tl.float32)
    x_high = tl.load(source[:, None] + high[None, :], mask=mask, other=0.0).to(tl.float32)
    rest = ROTATED + tl.arange(0, REST)
    rest_mask = here[:, None] & (rest < SIZE)[None, :]
    x_rest = tl.load(source[:, None] + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if HAS_NORMS:
        squares = tl.sum(x_low * x_low, axis=1) + tl.sum(x_high * x_high, axis=1) + tl.sum(x_rest * x_rest, axis=1)
        scale = (1.0 / tl.sqrt_rn(squares / SIZE + epsilon))[:, None]
        x_low = _weighted(x_low * scale, weight_ptr + low, inside, dtype)
        x_high = _weighted(x_high * scale, weight_ptr + high, inside, dtype)
        x_rest = _weighted(x_rest * scale, weight_ptr + rest, rest < SIZE, dtype)
    cos_low, cos_high = _factors(cos_ptr + low, inside), _factors(cos_ptr + high, inside)
    sin_low, sin_high = _factors(sin_ptr + low, inside), _factors(sin_ptr + high, inside)
    new_low = rounded(x_low * cos_low, dtype) - rounded(x_high * sin_low, dtype)
    new_high = rounded(x_high * cos_high, dtype) + rounded(x_low * sin_high, dtype)
    tl.store(target[:, None] + low[None, :], narrow(new_low, dtype), mask=mask)
    tl.store(target[:, None] + high[None, :], narrow(new_high, dtype), mask=mask)
    if SIZE > ROTATED:
        tl.store(target[:, None] + rest[None, :], narrow(x_rest, dtype), mask=rest_mask)


@triton.jit
def _weighted(normalised, weight_ptr, inside, dtype: tl.constexpr):
    return rounded(_factors(weight_ptr, inside) * rounded(normalised, dtype), dtype)


@triton.jit
def _factors(ptr, inside):
    return tl.load(ptr, mask=inside, other=0.0).to(tl.float32)[None, :]


# A fused multiply-add would skip the rounding of a product.
_rotary = Launcher(_rotary_kernel, num_warps=4, enable_fp_fusion=False)
