"""SiLU, GELU, sigmoid and softplus whose every element is the same bits wherever it lies in the tensor.

torch's functions compute the last few elements of a tensor (or of a thread's share) with another `exp` than the rest;
in float32 the two differ in the last bit. The C++ kernel has no such seam, nor has the eager twin:
`torch.exp` on contiguous float32.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import rows

GatedKernel = Callable[[Tensor, Tensor], Tensor]

_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
_CUBE = 0.044715
_LINEAR = 20.0
"""Above it softplus is the identity, as in torch."""


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), computed in float32 and rounded once to `x.dtype`; any shape and strides."""
    if torch.is_grad_enabled() and x.requires_grad:
        out: Tensor = _Elementwise.apply(x, _silu, torch.ops.aten.silu_backward)
        return out
    return _silu(x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), computed in float32 and rounded once to `x.dtype`; any shape and strides."""
    if torch.is_grad_enabled() and x.requires_grad:
        out: Tensor = _Elementwise.apply(x, _sigmoid, _sigmoid_backward)
        return out
    return _sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), and x itself above 20, in float32, rounded once to `x.dtype`; any shape and strides."""
    if torch.is_grad_enabled() and x.requires_grad:
        out: Tensor = _Elementwise.apply(x, _softplus, _softplus_backward)
        return out
    return _softplus(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form (Hendrycks and Gimpel 2016), in float32, rounded once to `x.dtype`; any shape and strides.

    0.5 x (1 + tanh u) is computed as x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3).
    """
    if torch.is_grad_enabled() and x.requires_grad:
        out: Tensor = _Elementwise.apply(x, _gelu, _gelu_backward)
        return out
    return _gelu(x)


def gated_silu(gate: Tensor, up: Tensor, kernel: GatedKernel | None = None) -> Tensor:
    """silu(gate) * up, rounded after each of the two; equal shapes, any strides, contiguous result.

    `kernel` replaces the CPU's forward; it need not support gradients.
    """
    kernel = kernel or _gated_silu
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        out: Tensor = _GatedSiLU.apply(gate, up, kernel)
        return out
    return kernel(gate, up)


def _silu(x: Tensor) -> Tensor:
    if rows.supports(x):
        return rows.activate(x)
    x32 = _contiguous_float32(x)
    return x32.div(torch.neg(x32).exp_().add_(1.0)).to(x.dtype)


def _sigmoid(x: Tensor) -> Tensor:
    if rows.supports(x):
        return rows.sigmoid(x)
    return torch.neg(_contiguous_float32(x)).exp_().add_(1.0).reciprocal().to(x.dtype)


def _softplus(x: Tensor) -> Tensor:
    if rows.supports(x):
        return rows.softplus(x)
    x32 = _contiguous_float32(x)
    return torch.where(x32 > _LINEAR, x32, torch.log1p(torch.exp(x32))).to(x.dtype)


def _gelu(x: Tensor) -> Tensor:
    x32 = _contiguous_float32(x)
    power = (x32 * x32).mul_(-_SLOPE * _CUBE).sub_(_SLOPE).mul_(x32)
    return x32.div(power.exp_().add_(1.0)).to(x.dtype)


def _gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    return rows.activate(gate, up) if rows.supports(gate, up) else _silu(gate) * up


def _contiguous_float32(x: Tensor) -> Tensor:
    return x.to(torch.float32, memory_format=torch.contiguous_format).contiguous()


def _sigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    result = _sigmoid(x)
    return grad * result * (1.0 - result)


def _softplus_backward(grad: Tensor, x: Tensor) -> Tensor:
    grad_x: Tensor = torch.ops.aten.softplus_backward(grad, x, 1.0, _LINEAR)
    return grad_x


def _gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    grad_x: Tensor = torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
    return grad_x


class _Elementwise(torch.autograd.Function):
    """Applies `function`; `backward_of(grad, x)` is the gradient of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], backward_of: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.backward_of = backward_of
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_of(grad, *ctx.saved_tensors), None, None


class _GatedSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernel: GatedKernel) -> Tensor:
        ctx.save_for_backward(gate, up)
        return kernel(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), grad * _silu(gate), None
