"""Gradients of recurrences on a device, from states that the forward has kept. Twin: autograd of `kernels.recurrence`.

A chunk is gone through backwards, GRID tokens at a time: the states between two kept ones are computed again into
scratch memory, and read in turn. A program takes one (chunk, head, block of columns) after the other, so the scratch
memory does not grow with the batch. Sums over columns are parts of blocks, which torch adds up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.cpu.recurrence import GRID
from rollout_engine.kernels.state_chunks import StateChunks
from rollout_engine.kernels.triton.launches import Launcher
from rollout_engine.kernels.triton.recurrence import load_decay, load_token, ready_inputs, strides_of
from rollout_engine.kernels.triton.tiling import next_power_of_2

_COLUMNS = 32
_PROGRAMS = 256
"""Most programs, each of which has scratch memory: 1 MiB for 128 channels of keys."""


def find_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    skip: Tensor | None,
    kept: Tensor,
    grad: Tensor,
    *,
    delta: bool,
    scale: float,
    chunks: StateChunks,
) -> tuple[Tensor | None, ...]:
    """Gradients of the six inputs, float32, of their shapes: see `kernels.cpu.recurrence.find_gradients`."""
    (num_tokens, num_groups, key_size), (_, num_heads, value_size) = q.shape, v.shape
    block = min(next_power_of_2(value_size), _COLUMNS)
    num_blocks = -(-value_size // block)
    num_items = chunks.num_chunks * num_heads * num_blocks
    num_programs, block_k = min(num_items, _PROGRAMS), next_power_of_2(key_size)

    def parts(*shape: int) -> Tensor:
        return v.new_empty(num_blocks, num_tokens, num_heads, *shape, dtype=torch.float32)

    by_channel = log_decay.dim() == 3
    made = parts(key_size), parts(key_size), parts(*[key_size] * by_channel), parts(), parts()
    grad_v = torch.empty_like(v, dtype=torch.float32, memory_format=torch.contiguous_format)
    if num_tokens and num_items:
        inputs, on_device = ready_inputs(q, k, v, log_decay, beta, skip), chunks.on(v.device)
        scratch = v.new_empty(num_programs * GRID * block_k * block, dtype=torch.float32)
        _backward.launch(
            (num_programs,),
            (*inputs, kept, grad.contiguous(), grad_v, *made, scratch, on_device.token_starts, on_device.write_starts),
            (num_items, num_tokens, num_heads, num_heads // num_groups, *strides_of(inputs)),
            (scale, GRID, key_size, value_size, by_channel, delta, skip is not None, block_k, block),
            num_warps=8,
        )
    of_q, of_k, of_decay, of_beta, of_skip = (x.sum(0) for x in made)
    grad_q, grad_k = (x.unflatten(1, (num_groups, -1)).sum(2) for x in (of_q, of_k))
    return grad_q, grad_k, grad_v, of_decay, of_beta, None if skip is None else of_skip.sum(0)


@triton.jit(
    do_not_specialize=[
        *("num_items", "num_tokens", "num_heads", "group_size"),
        *("q_token", "q_head", "k_token", "k_head", "v_token", "v_head"),
    ]
)
def _backward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    skip_ptr,
    kept_ptr,
    grad_ptr,
    grad_v_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_decay_ptr,
    grad_beta_ptr,
    grad_skip_ptr,
    scratch_ptr,
    starts_ptr,
    write_starts_ptr,
    num_items,
    num_tokens,
    num_heads,
    group_size,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    scale,
    GRID: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    DELTA: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    blocks: tl.constexpr = (VALUE + BLOCK_V - 1) // BLOCK_V
    row, lane = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    inputs = (q_ptr, k_ptr, v_ptr, beta_ptr)
    strides = (q_token, q_head, k_token, k_head, v_token, v_head)
    grads = (grad_q_ptr, grad_k_ptr, grad_v_ptr, grad_decay_ptr, grad_beta_ptr, grad_skip_ptr)
    mine = scratch_ptr + tl.program_id(0).to(tl.int64) * (GRID * BLOCK_K * BLOCK_V)
    tile = mine + row[:, None] * BLOCK_V + lane[None, :]
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        block, head = item % blocks, item // blocks % num_heads
        chunk, column = item // blocks // num_heads, block * BLOCK_V + lane
        first, end = tl.load(starts_ptr + chunk), tl.load(starts_ptr + chunk + 1)
        write = tl.load(write_starts_ptr + chunk)
        inside = (row < KEY)[:, None] & (column < VALUE)[None, :]
        kept = kept_ptr + head * (KEY * VALUE) + row[:, None] * VALUE + column[None, :]
        skip = 0.0
        if HAS_SKIP:
            skip = tl.load(skip_ptr + head)
        of_state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
        num_parts = (end - first + GRID - 1) // GRID
        for behind in range(0, num_parts):
            part = num_parts - 1 - behind
            start = first + part * GRID
            stop = tl.minimum(start + GRID, end)
            slot = (write + part - 1) * num_heads * (KEY * VALUE)
            state = tl.load(kept + slot, mask=inside & (part > 0), other=0.0)
            for t in range(start, stop):
                tl.store(tile + (t - start) * (BLOCK_K * BLOCK_V), state)
                _, k, v, beta = load_token(
                    inputs, strides, t, head, head // group_size, num_heads, scale, row, column, KEY, VALUE
                )
                state = state * load_decay(decay_ptr, t * num_heads + head, row, KEY, BY_CHANNEL)
                error = v
                if DELTA:
                    error = v - tl.sum(state * k[:, None], axis=0)
                state = state + k[:, None] * (beta * error)[None, :]
            tl.debug_barrier()  # states are read by other threads
            for back in range(0, stop - start):
                at = stop - 1 - back
                token_head = at * num_heads + head
                before = tl.load(tile + (at - start) * (BLOCK_K * BLOCK_V))
                token = load_token(
                    inputs, strides, at, head, head // group_size, num_heads, scale, row, column, KEY, VALUE
                )
                decay = load_decay(decay_ptr, token_head, row, KEY, BY_CHANNEL)
                of_out = tl.load(grad_ptr + token_head * VALUE + column, mask=column < VALUE, other=0.0)
                places = (block * num_tokens * num_heads + token_head, token_head)
                of_state = _step_back(
                    grads, places, row, column, before * decay, of_state, token, skip, of_out.to(tl.float32), scale,
                    KEY, VALUE, BY_CHANNEL, DELTA, HAS_SKIP,
                ) * decay  # fmt: skip
            tl.debug_barrier()


@triton.jit
def _step_back(
    grads,
    places,
    row,
    column,
    decayed,
    of_state,
    token,
    skip,
    of_out,
    scale,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    DELTA: tl.constexpr,
    HAS_SKIP: tl.constexpr,
):
    """Store the gradients of one token; returns that of the state that it found, decayed.

    `of_state` is that of the state which it leaves, by later tokens. `places`: its places among those of the block, and
    among those of whole rows.
    """
    grad_q, grad_k, grad_v, grad_decay, grad_beta, grad_skip = grads
    q, k, v, beta = token
    place, whole = places
    error = v
    if DELTA:
        error = v - tl.sum(decayed * k[:, None], axis=0)
    update = beta * error
    state = decayed + k[:, None] * update[None, :]
    of_state = of_state + q[:, None] * of_out[None, :]
    of_update = tl.sum(of_state * k[:, None], axis=0)
    of_key = tl.sum(of_state * update[None, :], axis=1)
    of_value = beta * of_update
    if DELTA:
        of_key = of_key - tl.sum(decayed * of_value[None, :], axis=1)
        of_state = of_state - k[:, None] * of_value[None, :]
    of_query = tl.sum(state * of_out[None, :], axis=1) * scale
    tl.store(grad_q + place * KEY + row, of_query, mask=row < KEY)
    tl.store(grad_k + place * KEY + row, of_key, mask=row < KEY)
    tl.store(grad_beta + place, tl.sum(of_update * error))
    of_decay = tl.sum(of_state * decayed, axis=1)
    if BY_CHANNEL:
        tl.store(grad_decay + place * KEY + row, of_decay, mask=row < KEY)
    else:
        tl.store(grad_decay + place, tl.sum(of_decay))
    if HAS_SKIP:
        tl.store(grad_skip + place, tl.sum(of_out * v))
        of_value = of_value + skip * of_out
    tl.store(grad_v + whole * VALUE + column, of_value, mask=column < VALUE)
    return of_state


_backward = Launcher(_backward_kernel)
