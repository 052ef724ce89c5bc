"""Linear recurrences with a matrix for a state: the gated delta rule, KDA and Mamba 2, one token after the other.

A head's state S [K, V] is float32. With g = log_decay, for each token

    S = exp(g) * S        one g of the head, or one of each row of S (each channel of the key)
    u = beta * (v - S^T k)    with the delta rule (Yang et al. 2024, Gated DeltaNet; Kimi Linear), else beta * v
    S = S + k u^T
    o = S^T (scale * q) + skip * v

Mamba 2 (Dao and Gu 2024) is the second form: k = B, q = C, v = x, beta = dt, g = dt * A, skip = D. Prefill, decode and
trainer all compute these steps in this order, so the bits of a state and an output depend on the tokens before them in
their sequence, and not on chunks, batch or threads.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import recurrence as compiled
from rollout_engine.kernels.cpu import rows
from rollout_engine.kernels.cpu.arguments import argument_error
from rollout_engine.kernels.state_chunks import StateChunks
from rollout_engine.kernels.state_kernels import TokenKernel

_COMPILED = TokenKernel(compiled.recur, compiled.find_gradients)
GRID = compiled.GRID
NormKernel = Callable[[Tensor, float], Tensor]


def gated_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    delta: bool,
    scale: float,
    chunks: StateChunks,
    states: Tensor | None = None,
    skip: Tensor | None = None,
    kernel: TokenKernel | None = None,
) -> Tensor:
    """Outputs [T, H, V] of the recurrence above, in `v.dtype`, for T tokens of sequences end to end.

    q and k [T, G, K] and v [T, H, V] are float32 or bfloat16, each by itself; head h reads group h // (H // G).
    `log_decay` is float32 [T, H] or [T, H, K], `beta` float32 [T, H], `skip` [H]. `states` float32 [S, H, K, V] are the
    slots that `chunks` reads and writes. Without them every chunk is a sequence from zeros, and the result has
    gradients of all inputs. `kernel`: a device's; None: the CPU's, or the eager twin. Raises `ValueError` for other
    shapes or dtypes, and for gradients with `states`.
    """
    _check(q, k, v, log_decay, beta, skip, states)
    chunks.check(len(q), None if states is None else len(states))
    inputs = [x for x in (q, k, v, log_decay, beta, skip) if x is not None]
    has_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if has_gradients and states is not None:
        raise ValueError("gated_recurrence with `states` has no gradients: omit `states`, or use torch.no_grad().")
    if kernel is None and not compiled.supports(*inputs):
        return _recur(q, k, v, log_decay, beta, skip, delta, scale, chunks, states)
    kernel = kernel or _COMPILED
    if has_gradients:
        out: Tensor = _Recurrence.apply(q, k, v, log_decay, beta, skip, delta, scale, chunks, kernel)
        return out
    return kernel.run(q, k, v, log_decay, beta, skip, delta=delta, scale=scale, chunks=chunks, states=states)


def l2_normalised(x: Tensor, epsilon: float, kernel: NormKernel | None = None) -> Tensor:
    """x / sqrt(sum(x^2) + epsilon) over the last dimension, float32 inside and as the result; any strides.

    `kernel` replaces the CPU's forward; it need not support gradients.
    """
    kernel = kernel or _normalise
    if torch.is_grad_enabled() and x.requires_grad:
        return _L2Normalised.apply(x, epsilon, kernel)  # type: ignore[no-any-return]
    return kernel(x, epsilon)


def _check(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, skip: Tensor | None, states: Tensor | None
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise argument_error(name, x, "a tensor of three dimensions, tokens, heads, channels")
    (num_tokens, num_groups, key_size), num_heads = q.shape, v.shape[1]
    if k.shape != q.shape:
        raise argument_error("k", k, f"{list(q.shape)} as q")
    if len(v) != num_tokens or not num_groups or num_heads % num_groups:
        raise argument_error("v", v, f"of {num_tokens} tokens, and of a multiple of {num_groups} heads, as q")
    by_head = (num_tokens, num_heads)
    if log_decay.dtype is not torch.float32 or log_decay.shape not in (by_head, (*by_head, key_size)):
        raise argument_error("log_decay", log_decay, f"float32 {list(by_head)} or {[*by_head, key_size]}")
    if beta.dtype is not torch.float32 or beta.shape != by_head:
        raise argument_error("beta", beta, f"float32 {list(by_head)}")
    if skip is not None and skip.shape != (num_heads,):
        raise argument_error("skip", skip, f"of {num_heads} elements, one a head")
    pool = (num_heads, key_size, v.shape[2])
    if states is None:
        return
    if states.dtype is not torch.float32 or states.shape[1:] != pool or not states.is_contiguous():
        raise argument_error("states", states, f"contiguous float32 [S, {pool[0]}, {pool[1]}, {pool[2]}]")


def _recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    skip: Tensor | None,
    delta: bool,
    scale: float,
    chunks: StateChunks,
    states: Tensor | None,
) -> Tensor:
    """The eager twin, differentiable by torch itself."""
    (_, num_groups, key_size), (_, num_heads, value_size) = q.shape, v.shape
    queries = (q.float() * scale).repeat_interleave(num_heads // num_groups, 1).unsqueeze(-1).unbind()
    keys = k.float().repeat_interleave(num_heads // num_groups, 1).unsqueeze(-1).unbind()
    decays = log_decay.contiguous().exp().view(*log_decay.shape, *[1] * (4 - log_decay.dim())).unbind()
    values, betas = v.float().unbind(), beta.unsqueeze(-1).unbind()
    zeros = q.new_zeros(num_heads, key_size, value_size, dtype=torch.float32)
    out = []
    for chunk in chunks.each():
        state = zeros if states is None or chunk.source < 0 else states[chunk.source].clone()
        for t in range(chunk.first, chunk.end):
            state = state * decays[t]
            error = values[t] - (state * keys[t]).sum(-2) if delta else values[t]
            state = state + keys[t] * (betas[t] * error).unsqueeze(-2)
            out.append((state * queries[t]).sum(-2))
            if states is not None and t + 1 in chunk.writes:
                states[chunk.writes[t + 1]] = state
    if not out:
        return v.new_empty(v.shape)
    read = torch.stack(out)
    return (read if skip is None else read + skip.float().unsqueeze(-1) * v.float()).to(v.dtype)


class _Recurrence(torch.autograd.Function):
    """A kernel's forward, which keeps the state after every GRID tokens, and backward, which computes those between."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        skip: Tensor | None,
        delta: bool,
        scale: float,
        chunks: StateChunks,
        kernel: TokenKernel,
    ) -> Tensor:
        ctx.kernel, ctx.chunks, ctx.delta, ctx.scale = kernel, chunks.write_every(GRID), delta, scale
        kept = q.new_empty(ctx.chunks.num_slots, v.shape[1], q.shape[2], v.shape[2], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, log_decay, beta, skip, kept)
        return kernel.run(q, k, v, log_decay, beta, skip, delta=delta, scale=scale, chunks=ctx.chunks, states=kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, beta, skip, kept = ctx.saved_tensors
        inputs = q, k, v, log_decay, beta, skip
        rule = {"delta": ctx.delta, "scale": ctx.scale, "chunks": ctx.chunks}
        found = ctx.kernel.find_gradients(*inputs, kept, grad, **rule)
        grads = (None if x is None else x.to(of.dtype) for x, of in zip(found, inputs, strict=True))
        return *grads, None, None, None, None


def _normalise(x: Tensor, epsilon: float) -> Tensor:
    if rows.supports(x):
        return rows.l2_normalise(x, epsilon)
    x32 = x.float()
    return x32 * _inverse_length(x32, epsilon)


def _inverse_length(x32: Tensor, epsilon: float) -> Tensor:
    return torch.rsqrt(x32.square().sum(-1, keepdim=True) + epsilon)


class _L2Normalised(torch.autograd.Function):
    """Backward of y = x s, s = 1 / sqrt(sum(x^2) + epsilon): dx = s (dy - y sum(y dy)); float32 inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float, kernel: NormKernel) -> Tensor:
        ctx.save_for_backward(x)
        ctx.epsilon = epsilon
        return kernel(x, epsilon)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors  # once: checkpointing of gradients counts
        if rows.supports(x):
            return rows.l2_gradient(x, grad, ctx.epsilon), None, None
        x32 = x.float()
        scale = _inverse_length(x32, ctx.epsilon)
        normal = x32 * scale
        inner = (normal * grad).sum(-1, keepdim=True)
        return ((grad - normal * inner) * scale).to(x.dtype), None, None
