"""Low-rank adapters (LoRA, Hu et al. 2021) added to linear layers, each row under its own adapter, or none.

    out[row] += scale * (x[row] @ A.T) @ B.T

Everything from x to the sum is float32, and the sum is rounded once; a row's bits do not depend on the other rows. The
engine and `rollout_engine.exact` on the trainer call the same function.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import adapters as compiled
from rollout_engine.kernels.cpu.adapters import AdapterPair, AdapterRows, AdapterTable

__all__ = ["Added", "AdapterPair", "AdapterRows", "AdapterTable", "add_adapter", "add_adapters", "added"]

Added: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""The signature of `added`."""


def add_adapters(table: AdapterTable, x: Tensor, out: Tensor, plan: AdapterRows) -> None:
    """Add each row's adapter to out [R, sum of sizes], in place; x [R, in_features] is the linears' input."""
    if compiled.supports(table.dtype):
        table.add(x, out, plan)
    else:
        _add_rows(table, x, out, plan)


def add_adapter(x: Tensor, out: Tensor, a: Tensor, b: Tensor, scale: float, kernel: Added | None = None) -> Tensor:
    """out [R, N] + scale * x [R, K] @ a.T @ b.T with the bits of `add_adapters`, differentiable.

    a [rank, K] and b [N, rank] have any floating dtype: they are rounded to that of x first. The result is a new
    tensor, and gradients reach all four. `kernel` computes it; None: that of the CPU.
    """
    kernel = kernel or added
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, out, a, b)):
        return _Added.apply(kernel, x, out, a, b, scale)  # type: ignore[no-any-return]
    return kernel(x, out, a, b, scale)


def added(x: Tensor, out: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """out [R, N] + scale * x [R, K] @ a.T @ b.T as a new tensor, without gradients."""
    table = AdapterTable(1, x.shape[-1], [len(b)], x.dtype)
    table.set(0, [AdapterPair.packed(a, b, scale, x.dtype)])
    result = out.detach().clone(memory_format=torch.contiguous_format)
    if plan := AdapterRows.of([0], [len(x)]):
        add_adapters(table, x.detach(), result, plan)
    return result


def _add_rows(table: AdapterTable, x: Tensor, out: Tensor, plan: AdapterRows) -> None:
    """The eager twin: row by row, since a library's products of many rows depend on their number."""
    for row, slot in zip(plan.rows.tolist(), plan.slots.tolist(), strict=True):
        column = 0
        for size, pair in zip(table.sizes, table.pairs[slot], strict=True):
            if pair is not None:
                wide, tall = pair.matrices(size)
                delta = (x[row].float() @ wide.float()) @ tall.float()
                part = out[row, column : column + size]
                part.copy_(part.float() + delta * pair.scale)
            column += size


class _Added(torch.autograd.Function):
    """The kernel forward; ordinary matrix products backward."""

    @staticmethod
    def forward(ctx: Any, kernel: Added, x: Tensor, out: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.scale = scale
        return kernel(x, out, a, b, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor, Tensor | None, Tensor | None, None]:
        x, a, b = ctx.saved_tensors
        scaled = grad.float() * ctx.scale
        low_grad = scaled @ b.to(x.dtype).float()
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[1]:
            grad_x = (low_grad @ a.to(x.dtype).float()).to(x.dtype)
        if ctx.needs_input_grad[3]:
            grad_a = (low_grad.t() @ x.float()).to(a.dtype)
        if ctx.needs_input_grad[4]:
            low = x.float() @ a.to(x.dtype).float().t()
            grad_b = (scaled.t() @ low).to(b.dtype)
        return None, grad_x, grad, grad_a, grad_b, None
