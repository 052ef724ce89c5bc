"""Forwards of foreign modules in which some of torch's functions are replaced by row-invariant ones of ours.

A router that no formula of `modules.experts` describes, and a module that gates by a sigmoid or a softplus, keep the
forward of their own class. Inside, these calls are replaced, gradients included; all others are torch's, and the row
trial decides whether their rows depend on the batch:

    linear(x, w), w the router's own weight     the packed product; float32 sums if the module casts x and w to float32
    sigmoid, softplus, silu, softmax            `kernels.activation`, `kernels.cpu.experts`
    sum over a few elements of each row         in their order
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollout_engine.kernels import activation
from rollout_engine.kernels.cpu import experts as kernels
from rollout_engine.kernels.cpu import gemm
from rollout_engine.model.modules.experts import scores, sum_in_order
from rollout_engine.model.modules.routers import call_router
from rollout_engine.model.packing.linear_groups import LinearGroup

_LARGEST_SUM = 64
"""Most elements that are added one after the other."""
_GATES = {"sigmoid", "softplus", "silu"}
"""Functions that some modules apply to the output of a linear, and whose last elements torch computes otherwise."""
_TABLE = "ACT2FN"
"""Transformers' table of activations, from which forwards inside a mixer take others."""


class OwnForward(nn.Module):
    """A module of a foreign class that computes its own forward with row-invariant calls."""

    _groups: list[LinearGroup]
    """The product of a router by its weight; no other module has this attribute."""


def swap_own_router(module: nn.Module) -> None:
    """Give a router the row-invariant calls that its forward needs, in place; or leave it as it is.

    It is left if its forward does not multiply by its weight once, or needs float32 sums that no kernel returns here.
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2:  # its product is a linear of its own
        swap_calls(module)
        return
    group = LinearGroup([OwnWeight(module)])  # type: ignore[list-item]  # has all that groups read
    for group.float32_out in (False, True) if gemm.supports(weight.dtype) else (False,):
        calls = _RowInvariantCalls(module, group)
        with calls:
            call_router(module)
        if calls.num_products == 1:
            swap_calls(module)
            module._groups = [group]  # type: ignore[assignment]
            return


def names_a_gate(module: nn.Module) -> bool:
    """Whether the forward of a module's class calls a function of `_GATES` itself."""
    return not _GATES.isdisjoint(_names_of(module))


def names_an_activation(module: nn.Module) -> bool:
    """Whether that forward calls one of `_GATES`, or an activation of transformers' table."""
    return not (_GATES | {_TABLE}).isdisjoint(_names_of(module))


def _names_of(module: nn.Module) -> tuple[str, ...]:
    forward: Any = inspect.unwrap(type(module).forward)
    names: tuple[str, ...] = getattr(getattr(forward, "__code__", None), "co_names", ())
    return names


def swap_calls(module: nn.Module) -> None:
    """Give the forward of a module row-invariant calls, in place."""
    kind: Any = type(module)  # mypy does not see that classes can be hashed
    module.__class__ = _with_own_forward(kind)


class OwnWeight:
    """The weight and bias of a module that is no linear, with the attributes of one."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.out_features = self.weight.shape[0]

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], read each time, because the parameter may have been replaced."""
        found: Tensor = self._module.weight  # type: ignore[assignment]
        return found

    @property
    def bias(self) -> Tensor | None:
        """[out_features]; None without one."""
        found: Tensor | None = getattr(self._module, "bias", None)
        return found


@cache
def _with_own_forward(cls: type[nn.Module]) -> type[nn.Module]:
    """A class like `cls` whose forward runs with row-invariant calls."""

    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        (group,) = getattr(self, "_groups", (None,))
        with _RowInvariantCalls(self, group):
            return cls.forward(self, *args, **kwargs)

    return type(cls.__name__, (OwnForward, cls), {"forward": forward, "__module__": cls.__module__})


class _RowInvariantCalls(TorchFunctionMode):
    """Replaces calls inside one forward of `module`, whose weight is multiplied by `group`, if it has one."""

    def __init__(self, module: nn.Module, group: LinearGroup | None) -> None:
        super().__init__()
        self._module, self._group = module, group
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}
        """(Result, source) of each cast to float32, by the id of the result, which this keeps alive."""
        self.num_products = 0
        """Products by the weight that the group has computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            result = self._multiply(*args, **kwargs)
        else:
            replace = _REPLACED.get(func)
            result = NotImplemented if replace is None else replace(args, kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        if func in _CASTS and isinstance(result, Tensor) and result is not args[0] and result.dtype == torch.float32:
            self._casts[id(result)] = result, args[0]
        return result

    def _multiply(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        group, own = self._group, self._source(weight)
        if group is None or own is not self._module.weight or bias is not getattr(self._module, "bias", None):
            return NotImplemented
        is_cast = own is not weight
        rows = self._source(input) if is_cast else input
        if is_cast != group.float32_out or rows.dtype != own.dtype:
            return NotImplemented
        self.num_products += 1
        (out,) = group.product(rows.reshape(-1, rows.shape[-1]), [own], [] if bias is None else [bias])
        return out.view(*rows.shape[:-1], out.shape[-1])

    def _source(self, tensor: Tensor) -> Tensor:
        """The tensor that `tensor` was cast from, or itself."""
        return self._casts.get(id(tensor), (None, tensor))[1]


def _elementwise(function: Callable[[Tensor], Tensor]) -> Callable[[Any, Mapping[str, Any]], Any]:
    """Replaces a call that has its input as the only argument."""

    def replace(args: Any, kwargs: Mapping[str, Any]) -> Any:
        return function(args[0]) if len(args) == 1 and not kwargs and args[0].is_floating_point() else NotImplemented

    return replace


def _silu(args: Any, kwargs: Mapping[str, Any]) -> Any:
    is_plain = len(args) == 1 and not kwargs.get("inplace") and args[0].is_floating_point()
    return activation.silu(args[0]) if is_plain else NotImplemented


def _softmax(args: Any, kwargs: Mapping[str, Any]) -> Any:
    x, dim, dtype = _bind_arguments(args, kwargs)
    if dim not in (-1, x.dim() - 1) or dtype not in (None, x.dtype, torch.float32) or not kernels.supports(x):
        return NotImplemented
    rows = scores(x.reshape(-1, x.shape[-1]), kernels.scores, is_sigmoid=False)
    return rows.view(x.shape).to(dtype or x.dtype)


def _sum(args: Any, kwargs: Mapping[str, Any]) -> Any:
    x, dim, dtype = _bind_arguments(args, kwargs)
    if dim not in (-1, x.dim() - 1) or dtype is not None or not x.is_floating_point() or x.shape[-1] > _LARGEST_SUM:
        return NotImplemented
    total = sum_in_order(x.float().reshape(-1, x.shape[-1])).to(x.dtype).view(x.shape[:-1])
    return total.unsqueeze(-1) if kwargs.get("keepdim") else total


def _bind_arguments(args: Any, kwargs: Mapping[str, Any]) -> tuple[Tensor, Any, Any]:
    """Input, dimension and dtype of a softmax or a sum; a dimension that is none of them if it is called otherwise."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if len(args) > 2 or not kwargs.keys() <= {"dim", "dtype", "keepdim", "_stacklevel"}:
        dim = None
    return args[0], dim, kwargs.get("dtype")


_CASTS = {Tensor.to, Tensor.type, Tensor.float}
_REPLACED: dict[Any, Callable[[Any, Mapping[str, Any]], Any]] = {
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid), _elementwise(activation.sigmoid)),
    F.softplus: _elementwise(activation.softplus),
    F.silu: _silu,
    **dict.fromkeys((torch.softmax, Tensor.softmax, F.softmax), _softmax),
    **dict.fromkeys((torch.sum, Tensor.sum), _sum),
}
