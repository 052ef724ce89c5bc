"""Recurrences with a matrix for a state, one token after the other, on a device. Twin: `kernels.recurrence`.

program     (chunk and head, block of columns of its state)

The block stays in registers for the length of a chunk: it is read from its slot before the first token, and written to
slots behind any. Decode, prefill and trainer run one compiled kernel: whether there are slots is data, and no number
that depends on the step is a constant. So the bits of a state depend on the tokens before it in its sequence alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.state_chunks import ChunkTensors, StateChunks
from rollout_engine.kernels.triton.launches import Launcher
from rollout_engine.kernels.triton.rounding import narrow
from rollout_engine.kernels.triton.tiling import next_power_of_2

_COLUMNS = 8
"""Columns of a program's block: 32 bytes of each row, and rows are summed within one warp."""


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    skip: Tensor | None,
    *,
    delta: bool,
    scale: float,
    chunks: StateChunks | ChunkTensors,
    states: Tensor | None,
) -> Tensor:
    """[T, H, V] in `v.dtype`: see `kernels.recurrence.gated_recurrence`, which has checked the arguments."""
    (_, num_groups, key_size), (_, num_heads, value_size) = q.shape, v.shape
    out = v.new_empty(v.shape)
    if not out.numel():
        return out
    block = min(next_power_of_2(value_size), _COLUMNS)
    inputs, on_device = ready_inputs(q, k, v, log_decay, beta, skip), tensors_of(chunks, v)
    pool = v.new_empty(1, dtype=torch.float32) if states is None else states
    _recur.launch(
        (len(on_device.sources) * num_heads, -(-value_size // block)),
        (*inputs, pool, out, *on_device[:-1]),
        (num_heads, num_heads // num_groups, *strides_of(inputs)),
        (scale, key_size, value_size, log_decay.dim() == 3, delta, skip is not None, next_power_of_2(key_size), block),
        num_warps=1,
    )
    return out


def tensors_of(chunks: StateChunks | ChunkTensors, like: Tensor) -> ChunkTensors:
    """The chunks on the device of a tensor."""
    return chunks if isinstance(chunks, ChunkTensors) else chunks.on(like.device)


def ready_inputs(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, skip: Tensor | None
) -> tuple[Tensor, ...]:
    """The six inputs as kernels read them: channels of q, k and v are neighbours, the others contiguous."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    beta = beta.contiguous()
    return q, k, v, log_decay.contiguous(), beta, beta if skip is None else skip.float().contiguous()


def strides_of(inputs: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Strides of tokens and heads of q, k and v."""
    q, k, v, *_ = inputs
    return *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]


@triton.jit
def load_token(
    pointers, strides, t, head, group, num_heads, scale, row, column, KEY: tl.constexpr, VALUE: tl.constexpr
):
    """q times its scale [BLOCK_K], k [BLOCK_K], v [BLOCK_V] and beta of token `t` and a head, float32."""
    q_ptr, k_ptr, v_ptr, beta_ptr = pointers
    q = tl.load(q_ptr + t * strides[0] + group * strides[1] + row, mask=row < KEY, other=0.0).to(tl.float32) * scale
    k = tl.load(k_ptr + t * strides[2] + group * strides[3] + row, mask=row < KEY, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + t * strides[4] + head * strides[5] + column, mask=column < VALUE, other=0.0).to(tl.float32)
    return q, k, v, tl.load(beta_ptr + t * num_heads + head)


@triton.jit
def load_decay(decay_ptr, token_head, row, KEY: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """The factor of a state at one token of one head, or those of its rows [BLOCK_K, 1]."""
    if BY_CHANNEL:
        decay = tl.exp(tl.load(decay_ptr + token_head * KEY + row, mask=row < KEY, other=0.0))[:, None]
    else:
        decay = tl.exp(tl.load(decay_ptr + token_head))
    return decay


@triton.jit(
    do_not_specialize=[
        *("num_heads", "group_size"),
        *("q_token", "q_head", "k_token", "k_head", "v_token", "v_head"),
    ],
    do_not_specialize_on_alignment=[
        *("q_ptr", "k_ptr", "v_ptr", "decay_ptr", "beta_ptr", "skip_ptr", "out_ptr"),
        *("starts_ptr", "sources_ptr", "write_starts_ptr", "ends_ptr", "slots_ptr"),
    ],
)
def _recur_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    skip_ptr,
    states_ptr,
    out_ptr,
    starts_ptr,
    sources_ptr,
    write_starts_ptr,
    ends_ptr,
    slots_ptr,
    num_heads,
    group_size,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    scale,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    DELTA: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    chunk, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    row, column = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (row < KEY)[:, None] & (column < VALUE)[None, :]
    group, pointers = head // group_size, (q_ptr, k_ptr, v_ptr, beta_ptr)
    strides = (q_token, q_head, k_token, k_head, v_token, v_head)
    first, end, source = tl.load(starts_ptr + chunk), tl.load(starts_ptr + chunk + 1), tl.load(sources_ptr + chunk)
    write, last_write = tl.load(write_starts_ptr + chunk), tl.load(write_starts_ptr + chunk + 1)
    place = states_ptr + head * (KEY * VALUE) + row[:, None] * VALUE + column[None, :]
    slot_size = num_heads * (KEY * VALUE)
    state = tl.load(place + source * slot_size, mask=inside & (source >= 0), other=0.0)
    next_end = tl.load(ends_ptr + write, mask=write < last_write, other=-1)
    skip = 0.0
    if HAS_SKIP:
        skip = tl.load(skip_ptr + head)
    for t in range(first, end):
        q, k, v, beta = load_token(pointers, strides, t, head, group, num_heads, scale, row, column, KEY, VALUE)
        state = state * load_decay(decay_ptr, t * num_heads + head, row, KEY, BY_CHANNEL)
        error = v
        if DELTA:
            error = v - tl.sum(state * k[:, None], axis=0)
        state = state + k[:, None] * (beta * error)[None, :]
        out = tl.sum(state * q[:, None], axis=0)
        if HAS_SKIP:
            out = out + skip * v
        here = out_ptr + (t * num_heads + head) * VALUE + column
        tl.store(here, narrow(out, out_ptr.dtype.element_ty), mask=column < VALUE)
        if next_end == t + 1:
            slot = tl.load(slots_ptr + write)
            tl.store(place + slot * slot_size, state, mask=inside & (slot >= 0))
            write += 1
            next_end = tl.load(ends_ptr + write, mask=write < last_write, other=-1)


_recur = Launcher(_recur_kernel, enable_fp_fusion=False)  # however the loop is unrolled, a token has the same bits
