"""Depthwise causal convolutions on a device, and the inputs kept for the next chunk. Twin: `kernels.convolution`.

program     (16 tokens, block of channels), then (chunk, block of channels) for the states behind its tokens

A sum is that of one element, in the order of the twin, so its bits do not depend on its place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.state_chunks import ChunkTensors, StateChunks
from rollout_engine.kernels.triton.launches import Launcher
from rollout_engine.kernels.triton.recurrence import tensors_of
from rollout_engine.kernels.triton.rounding import narrow
from rollout_engine.kernels.triton.tiling import next_power_of_2

_TOKENS = 16
_CHANNELS = 128


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    silu: bool,
    chunks: StateChunks | ChunkTensors,
    states: Tensor | None,
) -> Tensor:
    """[T, C] in `x.dtype`: see `kernels.convolution.causal_convolution`, which has checked the arguments."""
    (num_tokens, num_channels), width = x.shape, weight.shape[1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    x, weight, on_device = x if x.stride(1) == 1 else x.contiguous(), weight.contiguous(), tensors_of(chunks, x)
    starts, sources, *writes, owners = on_device
    x_token = x.stride(0) if num_tokens > 1 else num_channels  # any number is the stride of a lone row
    pool, blocks = x if states is None else states, -(-num_channels // _CHANNELS)
    _convolve.launch(
        (-(-num_tokens // _TOKENS), blocks),
        (x, weight, weight if bias is None else bias, pool, out, starts, sources, owners),
        (num_tokens,),
        (num_channels, x_token, width, bias is not None, silu, _TOKENS, _CHANNELS),
    )
    if states is not None and width > 1:
        _keep.launch(
            (len(sources), blocks),
            (x, states, starts, sources, *writes),
            (),
            (num_channels, x_token, width - 1, next_power_of_2(width - 1), _CHANNELS),
        )
    return out


def find_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, *, silu: bool, chunks: StateChunks
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, `weight` and `bias`, float32, for sequences from their start; sums before SiLU are made again."""
    on_device = chunks.on(x.device)
    place = torch.arange(len(x), device=x.device) - on_device.token_starts[on_device.owners]
    x32, taps, of_sum = x.float(), weight.float().t(), grad.float()
    reaches = [(place >= back).unsqueeze(1) for back in reversed(range(len(taps)))]
    inputs = [x32.roll(len(taps) - 1 - j, 0).where(inside, 0.0) for j, inside in enumerate(reaches)]
    if silu:
        start = 0.0 if bias is None else bias.float()
        total = start + sum(tap * each for tap, each in zip(taps, inputs, strict=True))
        of_sum = torch.ops.aten.silu_backward(of_sum, total)
    of_x = torch.zeros_like(x32)
    for j, (tap, inside) in enumerate(zip(taps, reaches, strict=True)):
        of_x += (tap * of_sum).where(inside, 0.0).roll(j + 1 - len(taps), 0)
    of_weight = torch.stack([(of_sum * each).sum(0) for each in inputs], 1)
    return of_x, of_weight, None if bias is None else of_sum.sum(0)


@triton.jit
def _load_inputs(x_ptr, states_ptr, at, first, source, channel, keep, num_channels, x_token, BEFORE: tl.constexpr):
    """Inputs at flat indices `at`, which may lie before the chunk's `first` token: then they are its source's, or 0."""
    is_own = at >= first
    own = tl.load(x_ptr + at * x_token + channel, mask=keep & is_own, other=0.0)
    if BEFORE > 0:
        row = source * BEFORE + at - first + BEFORE
        earlier = keep & (at < first) & (source >= 0)
        own = tl.where(is_own, own, tl.load(states_ptr + row * num_channels + channel, mask=earlier, other=0.0))
    return own


@triton.jit(do_not_specialize=["num_tokens"])
def _convolve_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    states_ptr,
    out_ptr,
    starts_ptr,
    sources_ptr,
    owners_ptr,
    num_tokens,
    num_channels,
    x_token,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    in_batch, in_row = token < num_tokens, channel < num_channels
    chunk = tl.load(owners_ptr + token, mask=in_batch, other=0)
    first, source = tl.load(starts_ptr + chunk)[:, None], tl.load(sources_ptr + chunk)[:, None]
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=in_row, other=0.0).to(tl.float32)[None, :]
    keep = in_batch[:, None] & in_row[None, :]
    for j in tl.static_range(WIDTH):
        at = token[:, None] - (WIDTH - 1 - j)
        x = _load_inputs(x_ptr, states_ptr, at, first, source, channel[None, :], keep, num_channels, x_token, WIDTH - 1)
        tap = tl.load(weight_ptr + channel * WIDTH + j, mask=in_row, other=0.0).to(tl.float32)
        total = total + tap[None, :] * x.to(tl.float32)
    if HAS_SILU:
        total = total / (1.0 + tl.exp(-total))
    place = out_ptr + token[:, None] * num_channels + channel[None, :]
    tl.store(place, narrow(total, out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _keep_kernel(
    x_ptr,
    states_ptr,
    starts_ptr,
    sources_ptr,
    write_starts_ptr,
    ends_ptr,
    slots_ptr,
    num_channels,
    x_token,
    BEFORE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write the inputs before each position that is asked for; the slot that the chunk reads is the last one."""
    chunk, row = tl.program_id(0), tl.arange(0, BLOCK)[:, None]
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    first, source = tl.load(starts_ptr + chunk), tl.load(sources_ptr + chunk)
    keep = (row < BEFORE) & (channel < num_channels)
    start, stop = tl.load(write_starts_ptr + chunk), tl.load(write_starts_ptr + chunk + 1)
    for turn in tl.static_range(2):
        for write in range(start, stop):
            slot = tl.load(slots_ptr + write)
            if turn == 0:
                is_due = slot != source
            else:
                is_due = slot == source
            if is_due:
                at = tl.load(ends_ptr + write) - BEFORE + row
                x = _load_inputs(x_ptr, states_ptr, at, first, source, channel, keep, num_channels, x_token, BEFORE)
                tl.debug_barrier()  # threads read all rows before one writes any
                place = states_ptr + (slot * BEFORE + row) * num_channels + channel
                tl.store(place, x, mask=keep & (slot >= 0))


_convolve = Launcher(_convolve_kernel, enable_fp_fusion=False)
_keep = Launcher(_keep_kernel)
