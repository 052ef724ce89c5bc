"""GELU in its tanh form (Hendrycks and Gimpel 2016), every element the same bits wherever it lies in the tensor.

torch's fused kernel has the seam that `kernels.activation` tells of. Here 0.5 x (1 + tanh u) is x / (1 + exp(-2u)), of
operations without one.
"""

import math
from typing import Any

import torch
from torch import Tensor

_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
_CUBE = 0.044715


def gelu_tanh(x: Tensor) -> Tensor:
    """x / (1 + exp(-2 sqrt(2/pi) (x + 0.044715 x^3))), in float32, rounded once to `x.dtype`; any shape and strides."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _GELU.apply(x)
    return _gelu(x)


def _gelu(x: Tensor) -> Tensor:
    x32 = x.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
    power = (x32 * x32).mul_(-_SLOPE * _CUBE).sub_(_SLOPE).mul_(x32)
    return x32.div(power.exp_().add_(1.0)).to(x.dtype)


class _GELU(torch.autograd.Function):
    """Backward of x s(v), s the logistic function: s + x s (1 - s) v'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gelu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x = ctx.saved_tensors[0].float()
        s = torch.sigmoid(_SLOPE * (x + _CUBE * x**3))
        slope = s + x * s * (1 - s) * _SLOPE * (1 + 3 * _CUBE * x * x)
        return (grad.float() * slope).to(grad.dtype)
