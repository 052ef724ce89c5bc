"""SiLU whose every element is the same bits wherever it lies in the tensor, alone or times a second operand.

`torch.nn.functional.silu` computes the last few elements of a tensor (or of a thread's share) with another `exp` than
the rest; in float32 the two differ in the last bit. The C++ kernel has no such seam, nor has the eager twin:
`torch.exp` on contiguous float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import rows

Gated = Callable[[Tensor, Tensor], Tensor]


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), computed in float32 and rounded once to `x.dtype`; any shape and strides."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _SiLU.apply(x)
    return _silu(x)


def gated_silu(gate: Tensor, up: Tensor, kernel: Gated | None = None) -> Tensor:
    """silu(gate) * up, rounded after each of the two; equal shapes, any strides, contiguous result.

    `kernel`: another that computes so, without gradients.
    """
    kernel = kernel or _gated_silu
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _GatedSiLU.apply(gate, up, kernel)
    return kernel(gate, up)


def _silu(x: Tensor) -> Tensor:
    if rows.supports(x):
        return rows.activate(x)
    x32 = x.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
    return x32.div(torch.neg(x32).exp_().add_(1.0)).to(x.dtype)


def _gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    return rows.activate(gate, up) if rows.supports(gate, up) else _silu(gate) * up


def _slope(x: Tensor) -> Tensor:
    """Derivative of SiLU, float32."""
    x32 = x.float()
    sigmoid = torch.sigmoid(x32)
    return sigmoid * (1 + x32 * (1 - sigmoid))


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _silu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad.float() * _slope(ctx.saved_tensors[0])).to(grad.dtype)


class _GatedSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernel: Gated) -> Tensor:
        ctx.save_for_backward(gate, up)
        return kernel(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        grad_gate = ((grad * up).float() * _slope(gate)).to(gate.dtype)
        return grad_gate, grad * _silu(gate), None
