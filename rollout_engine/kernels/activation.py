"""SiLU whose every element is the same bits wherever it lies in the tensor.

`torch.nn.functional.silu` computes the last few elements of a tensor (or of a thread's share) with another `exp` than
the rest; in float32 the two differ in the last bit. `torch.exp` on contiguous float32 does not have that seam.
"""

from typing import Any

import torch
from torch import Tensor


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), computed in float32 and rounded once to `x.dtype`; any shape."""
    return _SiLU.apply(x)


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        x32 = x.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
        return x32.div(torch.neg(x32).exp_().add_(1.0)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x32 = ctx.saved_tensors[0].float()
        sigmoid = torch.sigmoid(x32)
        return (grad.float() * sigmoid * (1 + x32 * (1 - sigmoid))).to(grad.dtype)
