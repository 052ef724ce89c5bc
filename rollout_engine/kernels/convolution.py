"""The short causal convolution of each channel that stands before a recurrence, or is a layer's only mixing (LFM2)."""

from typing import Any

import torch
from torch import Tensor

from rollout_engine.kernels.activation import silu as silu_of
from rollout_engine.kernels.cpu import convolution as compiled
from rollout_engine.kernels.cpu.arguments import argument_error
from rollout_engine.kernels.state_chunks import StateChunks
from rollout_engine.kernels.state_kernels import TokenKernel

_COMPILED = TokenKernel(compiled.convolve, compiled.find_gradients)


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    silu: bool,
    chunks: StateChunks,
    states: Tensor | None = None,
    kernel: TokenKernel | None = None,
) -> Tensor:
    """bias + sum over j of weight[:, j] * x[t - (W - 1) + j], and SiLU of it if asked: [T, C] in `x.dtype`.

    x [T, C], `weight` [C, W] and `bias` [C] are float32 or bfloat16. A sum has one order, in float32, and is rounded
    once, after SiLU. `states` [S, W - 1, C] of `x.dtype` are the slots that `chunks` reads and writes: the W - 1 inputs
    before a position, oldest first, zeros before the start of a sequence. Without them every chunk is a sequence from
    its start, and the result has gradients of all inputs. `kernel`: a device's; None: the CPU's, or the eager twin.
    Raises `ValueError` for other shapes or dtypes, and for gradients with `states`.
    """
    _check(x, weight, bias, states)
    chunks.check(len(x), None if states is None else len(states))
    inputs = [each for each in (x, weight, bias) if each is not None]
    has_gradients = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
    if has_gradients and states is not None:
        raise ValueError("causal_convolution with `states` has no gradients: omit `states`, or use torch.no_grad().")
    if kernel is None and not compiled.supports(*inputs):
        return _convolve(x, weight, bias, silu, chunks, states)
    kernel = kernel or _COMPILED
    if has_gradients:
        return _Convolution.apply(x, weight, bias, silu, chunks, kernel)  # type: ignore[no-any-return]
    return kernel.run(x, weight, bias, silu=silu, chunks=chunks, states=states)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor | None) -> None:
    if x.dim() != 2:
        raise argument_error("x", x, "a tensor of two dimensions, tokens and channels")
    num_channels = x.shape[1]
    if weight.dim() != 2 or len(weight) != num_channels or not weight.shape[1]:
        raise argument_error("weight", weight, f"[{num_channels}, W], a row of W for each channel of x")
    if bias is not None and bias.shape != (num_channels,):
        raise argument_error("bias", bias, f"of {num_channels} elements, one a channel")
    tail = (weight.shape[1] - 1, num_channels)
    if states is None:
        return
    if states.dtype is not x.dtype or states.shape[1:] != tail or not states.is_contiguous():
        raise argument_error("states", states, f"contiguous {x.dtype} [S, {tail[0]}, {tail[1]}]")


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, chunks: StateChunks, states: Tensor | None
) -> Tensor:
    """The eager twin, differentiable by torch itself."""
    columns = weight.float().t().unbind()
    before = len(columns) - 1
    start = torch.zeros_like(columns[0]) if bias is None else bias.float()
    zeros, sums = x.new_zeros(before, x.shape[1]), []
    parts = x.split([chunk.end - chunk.first for chunk in chunks.each()])
    for chunk, part in zip(chunks.each(), parts, strict=True):
        tail = zeros if states is None or chunk.source < 0 else states[chunk.source]
        inputs = torch.cat((tail, part))
        rows = inputs.float()
        total = start
        for j, column in enumerate(columns):
            total = total + column * rows[j : j + len(part)]
        sums.append(total)
        if states is not None:
            for end, slot in chunk.writes.items():
                states[slot] = inputs[end - chunk.first : end - chunk.first + before]
    out = torch.cat(sums) if sums else x.float()
    return (silu_of(out) if silu else out).to(x.dtype)


class _Convolution(torch.autograd.Function):
    """The kernel forward and backward, which computes the sums before SiLU again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        silu: bool,
        chunks: StateChunks,
        kernel: TokenKernel,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.silu, ctx.chunks, ctx.kernel = silu, chunks, kernel
        return kernel.run(x, weight, bias, silu=silu, chunks=chunks, states=None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        x, weight, bias = inputs
        found = ctx.kernel.find_gradients(x, weight, bias, grad, silu=ctx.silu, chunks=ctx.chunks)
        wanted = zip(found, inputs, ctx.needs_input_grad, strict=False)
        return *(each.to(of.dtype) if needed else None for each, of, needed in wanted), None, None, None
