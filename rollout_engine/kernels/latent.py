"""The products of multi-head latent attention without expanded keys and values (DeepSeek-V2, section 2.1).

A token's latent c of R channels becomes, for each head, N channels of a key and V of a value: k = A c, v = B c. Scores
are q k = (A^T q) c, and sum(w v) = B sum(w c), so attention reads latents, which all heads share, in place of keys and
values: `absorb` is the product before it, `expand` the one after it. Each is summed in float32 and rounded once to the
dtype of the weights; a row has the same bits in any batch. By packed weights it has other bits than by plain ones: an
engine and its trainer both pack, or neither does.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import latent as compiled
from rollout_engine.kernels.cpu.gemm import PackedWeight

Kernel = Callable[[Tensor, Tensor, int], Tensor]


class LatentKernels(NamedTuple):
    """Forwards of `absorb` and `expand` on one kind of device, without gradients; rows and weights have strides."""

    absorb: Kernel
    expand: Kernel


def absorb_packed(packed: PackedWeight) -> Kernel:
    """The forward of `absorb` by the matrices [R, N] of all heads, each filled up with zeros to whole panels."""
    return lambda q, weight, nope: compiled.multiply_heads(_dense(q), packed, weight.shape[2], tail=q.shape[2] - nope)


def expand_packed(packed: PackedWeight) -> Kernel:
    """The forward of `expand` by the matrices [V, R] of all heads, as in `absorb_packed`."""
    return lambda x, weight, nope: compiled.multiply_heads(_dense(x), packed, weight.shape[1] - nope)


def absorb(q: Tensor, weight: Tensor, nope: int, kernel: Kernel | None = None) -> Tensor:
    """q [T, H, N + P] and `weight` [H, N + V, R] -> [T, H, R + P], differentiable.

    The first N = `nope` channels become those that meet latents; the last P are as they were. `kernel` replaces the
    forward by plain weights on a CPU.
    """
    kernel = kernel or _absorb_rows
    if torch.is_grad_enabled() and (q.requires_grad or weight.requires_grad):
        return _Absorb.apply(q, weight, nope, kernel)  # type: ignore[no-any-return]
    return kernel(q, weight, nope)


def expand(x: Tensor, weight: Tensor, nope: int, kernel: Kernel | None = None) -> Tensor:
    """Mixed latents x [T, H, R] and `weight` [H, N + V, R] -> values [T, H, V], differentiable; `kernel` as before."""
    kernel = kernel or _expand_rows
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Expand.apply(x, weight, nope, kernel)  # type: ignore[no-any-return]
    return kernel(x, weight, nope)


class LatentAdapter(NamedTuple):
    """A low-rank adapter (LoRA, Hu et al. 2021) of the matrix: some rows multiply by weight + scale * b @ a."""

    a: Tensor
    """[rank, R]."""
    b: Tensor
    """[H, N + V, rank]."""
    scale: float
    rows: Tensor | None = None
    """int64, the tokens that have it; None: all."""

    def absorb(self, q: Tensor, absorbed: Tensor, nope: int) -> Tensor:
        """The result [T, H, R + P] of `absorb`, with the adapter: + scale * ((q b) a); differentiable."""
        low = absorb(q[..., :nope], self.b, nope)
        wide = absorb(low.flatten(0, 1)[:, None], self.a[None], len(self.a)).view(*low.shape[:2], -1)
        rank = wide.shape[-1]
        return torch.cat((absorbed[..., :rank] + wide * self.scale, absorbed[..., rank:]), -1)

    def expand(self, x: Tensor, expanded: Tensor, nope: int) -> Tensor:
        """The result [T, H, V] of `expand`, with the adapter: + scale * (b (a x)); differentiable."""
        low = expand(x.flatten(0, 1)[:, None], self.a[None], 0).view(*x.shape[:2], -1)
        return expanded + expand(low, self.b, nope) * self.scale


def _absorb_rows(q: Tensor, weight: Tensor, nope: int) -> Tensor:
    q = _dense(q)
    if compiled.supports(q, weight):
        return compiled.absorb(q, weight, nope)
    found = _by_token(q[..., :nope], weight[:, :nope])
    return torch.cat((found, q[..., nope:]), -1)


def _expand_rows(x: Tensor, weight: Tensor, nope: int) -> Tensor:
    x = _dense(x)
    return compiled.expand(x, weight, nope) if compiled.supports(x, weight) else _by_token(x, weight[:, nope:].mT)


def _dense(x: Tensor) -> Tensor:
    """`x` with a dense last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_token(x: Tensor, weight: Tensor) -> Tensor:
    """The eager twin: x [T, H, K] @ `weight` [H, K, M], a token at a time: products of many depend on their number."""
    out = x.new_empty(*x.shape[:2], weight.shape[-1])
    weight = weight.float()
    for token, row in enumerate(x.float()):
        out[token] = torch.bmm(row[:, None], weight)[:, 0]
    return out


class _Absorb(torch.autograd.Function):
    """The kernel forward; ordinary matrix products backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, weight: Tensor, nope: int, kernel: Kernel) -> Tensor:
        ctx.save_for_backward(q, weight)
        ctx.nope = nope
        return kernel(q, weight, nope)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (q, weight), nope = ctx.saved_tensors, ctx.nope  # read once, as gradient checkpointing asks
        rank = weight.shape[2]
        latent = grad[..., :rank].transpose(0, 1)
        grad_q = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_q = torch.cat((torch.bmm(latent, weight[:, :nope].mT).transpose(0, 1), grad[..., rank:]), -1)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight)
            grad_weight[:, :nope] = torch.bmm(q[..., :nope].permute(1, 2, 0), latent)
        return grad_q, grad_weight, None, None


class _Expand(torch.autograd.Function):
    """The kernel forward; ordinary matrix products backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, nope: int, kernel: Kernel) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.nope = nope
        return kernel(x, weight, nope)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x, weight), nope = ctx.saved_tensors, ctx.nope
        by_head = grad.transpose(0, 1)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.bmm(by_head, weight[:, nope:]).transpose(0, 1)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight)
            grad_weight[:, nope:] = torch.bmm(by_head.mT, x.transpose(0, 1))
        return grad_x, grad_weight, None, None
