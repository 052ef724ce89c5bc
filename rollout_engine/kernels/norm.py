"""RMSNorm of Llama, Qwen2 and Qwen3 (Zhang and Sennrich 2019); each row has the same bits in any batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import rows

Kernel = Callable[[Tensor, Tensor, float], Tensor]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, kernel: Kernel | None = None) -> Tensor:
    """weight * round(x / sqrt(mean(x^2) + epsilon)) over the last dimension; any strides, contiguous result.

    float32 inside, rounded to `x.dtype` before and after the weight, which has that dtype too. `kernel` replaces
    the CPU's forward; it need not support gradients.
    """
    kernel = kernel or _forward
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        out: Tensor = _RMSNorm.apply(x, weight, epsilon, kernel)
        return out
    return kernel(x, weight, epsilon)


def _forward(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    if rows.supports(x, weight):
        return rows.norm(x, weight, epsilon)
    return weight * _normalised(x, epsilon)[0].to(x.dtype)


def _normalised(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(x / rms, 1 / rms), float32."""
    x32 = x.float()
    scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + epsilon)
    return x32 * scale, scale


class _RMSNorm(torch.autograd.Function):
    """Backward of y = w n, n = x s, s = 1 / rms: dx = s (w dy - n mean(n w dy)), dw = sum(dy n); float32 inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, kernel: Kernel) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return kernel(x, weight, epsilon)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, *_ = ctx.needs_input_grad
        if rows.supports(x, weight):
            grads = rows.norm_gradients(x, weight, grad, ctx.epsilon, of_x=of_x, of_weight=of_weight)
            return grads[0], None if grads[1] is None else grads[1].to(weight.dtype), None, None
        normalised, scale = _normalised(x, ctx.epsilon)
        grad32 = grad.float()
        grad_x = grad_weight = None
        if of_x:
            inner = grad32 * weight.float()
            mean = (inner * normalised).mean(-1, keepdim=True)
            grad_x = inner.sub_(normalised * mean).mul_(scale).to(x.dtype)
        if of_weight:
            grad_weight = (grad32 * normalised).flatten(0, -2).sum(0).to(weight.dtype)
        return grad_x, grad_weight, None, None
