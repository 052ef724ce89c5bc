"""Products inside a vision tower that no linear holds, and threads of the other operations.

Pictures are encoded one at a time by engine and trainer, so rows may depend on one another; nothing may depend on the
number of threads. Our products do not. Operations that move data, or round each element once, do not either; torch's
other functions, which treat the last elements of a thread's share in another way, run on one thread.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels import linear
from rollout_engine.kernels.cpu import gemm
from rollout_engine.model.modules.one_thread import one_thread

_THREADED = set(
    """
    __get__ __set__ __getitem__ __setitem__ __len__ __add__ __radd__ __iadd__ __sub__ __rsub__ __mul__ __rmul__
    __imul__ __truediv__ __neg__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __invert__ add sub mul div neg
    view reshape view_as expand expand_as permute transpose t flatten unflatten squeeze unsqueeze unbind split chunk cat
    concat stack contiguous clone to type float bfloat16 detach size dim stride numel is_floating_point index_select
    embedding layer_norm masked_fill masked_scatter repeat repeat_interleave unfold narrow movedim arange zeros ones
    empty full zeros_like ones_like tensor tolist item where argsort sort dropout
    """.split()
)
"""Functions whose every element is the same on any number of threads."""
_BY_LAYOUT = set(
    """
    gelu silu sigmoid tanh relu relu6 hardswish mish softplus elu leaky_relu exp exp2 expm1 log log2 log1p erf erfc sin
    cos tan sqrt rsqrt reciprocal pow __pow__ softmax log_softmax
    """.split()
)
"""Functions of each element or row whose bits depend on the strides of their input: those at the end of a loop are
computed in another way. Products of linears that share an input are slices of a tensor, unless an adapter is added."""


class TowerArithmetic(torch.overrides.TorchFunctionMode):
    """Inside, torch's calls of this thread give the same bits on any number of threads.

    Raises `ConfigError` for dropout.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replace = _REPLACED.get(func)
        result = NotImplemented if replace is None else replace(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if getattr(func, "__name__", "") in _THREADED and "alpha" not in kwargs:  # else some sums are fused products
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") in _BY_LAYOUT and args and isinstance(args[0], Tensor):
            args = (args[0] if kwargs.get("inplace") else args[0].contiguous(), *args[1:])
        with one_thread():
            return func(*args, **kwargs)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [R, K] @ weight [N, K].T + bias [N] -> [R, N], rounded once, on any number of threads alike; differentiable."""
    out: Tensor = _Product.apply(x, weight, bias)
    return out


def plain_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Do as `multiply`, without gradients."""
    if gemm.supports(x.dtype):
        return gemm.matmul(x, gemm.pack(weight), bias)
    plan = linear.plan_for(weight)
    return linear.matmul(x, linear.pack(weight, plan), bias, plan)


class _Product(torch.autograd.Function):
    """Our product forward; ordinary ones backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return plain_product(x, weight.detach(), None if bias is None else bias.detach())

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (
            grad @ weight if needs[0] else None,
            grad.t() @ x if needs[1] else None,
            grad.sum(0) if needs[2] else None,
        )


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = multiply(input.reshape(-1, input.shape[-1]), weight, bias)
    return rows.view(*input.shape[:-1], len(weight))


def _matmul(input: Tensor, other: Tensor, **kwargs: Any) -> Any:
    if input.dim() == other.dim() == 3 and len(input) == len(other) and not kwargs:
        return torch.stack([multiply(one.contiguous(), two.t()) for one, two in zip(input, other, strict=True)])
    if other.dim() != 2 or input.dim() < 2 or kwargs:
        return NotImplemented
    return _linear(input, other.t())


def _convolve_patches(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """A convolution over patches that do not overlap: input [B, C, ...], weight [N, C, *size] -> [B, N, ...].

    Pixels of another dtype are rounded to the weight's, as most towers do themselves. Others are left to torch.
    """
    num_dims = weight.dim() - 2
    sizes = tuple(weight.shape[2:])
    is_plain = padding in (0, "valid", (0,) * num_dims) and dilation in (1, (1,) * num_dims) and groups == 1
    if not is_plain or input.dim() != weight.dim() or _each(stride, num_dims) != sizes:
        return NotImplemented
    for dim, size in enumerate(sizes, 2):
        input = input.unfold(dim, size, size)
    patches = input.movedim(1, 1 + num_dims).to(weight.dtype)  # [B, *grid, C, *size]
    rows = multiply(patches.reshape(-1, weight[0].numel()), weight.reshape(len(weight), -1), bias)
    return rows.view(*patches.shape[: 1 + num_dims], len(weight)).movedim(-1, 1).contiguous()


def _each(value: Any, num_dims: int) -> tuple[int, ...]:
    return (value,) * num_dims if isinstance(value, int) else tuple(value)


def _refuse_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if training and p > 0:
        raise ConfigError(
            f"The vision tower drops activations at random (p={p}), which no engine does. Set its dropout to 0, or "
            "call model.eval()."
        )
    return input


_REPLACED: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    F.conv2d: _convolve_patches,
    F.conv3d: _convolve_patches,
    F.dropout: _refuse_dropout,
}
