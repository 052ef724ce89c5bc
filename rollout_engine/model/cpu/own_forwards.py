"""Forwards of foreign modules in which some of torch's functions are replaced by row-invariant ones of ours.

A router that no formula of `modules.experts` describes, and a module that gates by a sigmoid or a softplus, keep the
forward of their own class. Inside, these calls are replaced, gradients included; all others are torch's, and the row
trial decides whether their rows depend on the batch:

    linear(x, w), w the router's own weight     the packed product; float32 sums if the module casts x and w to float32;
                                                w may be that of a linear below the router which is not called
    sigmoid, softplus, softmax                  `kernels.activation`, `kernels.cpu.experts`
    sum over a few elements of each row         in their order
"""

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
from rollout_engine.model.modules.module_patterns import names_in_forward
from rollout_engine.model.modules.routers import call_router
from rollout_engine.model.packing.linear_groups import LinearGroup, swap_linears
from rollout_engine.model.packing.module_types import tensor_of

_LARGEST_SUM = 64
"""Most elements that are added one after the other."""
_GATES = {"sigmoid", "softplus"}
"""Functions that some modules apply to the output of a linear, and whose last elements torch computes otherwise."""


class OwnForward(nn.Module):
    """A module of a foreign class that computes its own forward with row-invariant calls."""

    _groups: list[LinearGroup]
    """The product of a router by its own weight; no other module has this attribute."""
    _multiplied: str = ""
    """Name of the linear below a router by whose weight it multiplies; "": the router itself."""


def swap_own_router(module: nn.Module) -> None:
    """Give a router the row-invariant calls that its forward needs, in place; or leave it as it is.

    It is left if its forward does not multiply by its weight once, or needs float32 sums that no kernel returns here.
    """
    linears = [(name, child) for name, child in module.named_modules() if type(child) is nn.Linear]
    has_weight = isinstance(weight := getattr(module, "weight", None), nn.Parameter) and weight.dim() == 2
    for name, owner in [("", module)] if has_weight else linears:
        if (group := _product_by(module, owner)) is None:
            continue
        swap_calls(module)
        router: Any = module
        router._multiplied = name
        if owner is module:
            router._groups = [group]
        else:
            swap_linears(module)
            owner._group.float32_out = group.float32_out  # type: ignore[union-attr]
        return
    if not has_weight:  # its product is the forward of a linear
        swap_calls(module)


def _product_by(router: nn.Module, owner: nn.Module) -> LinearGroup | None:
    """The product that a router computes by the weight of `owner`, itself or a linear below it; None if another does.

    The products of a linear that is called are its own.
    """
    group = LinearGroup([OwnWeight(owner)])  # type: ignore[list-item]  # has all that groups read
    was_called: list[bool] = []
    handle = owner.register_forward_pre_hook(lambda *_: was_called.append(True))
    try:
        for group.float32_out in (False, True) if gemm.supports(tensor_of(owner).dtype) else (False,):
            calls = _RowInvariantCalls(owner, group)
            with calls:
                call_router(router)
            if calls.num_products == 1 and not was_called:
                return group
    finally:
        handle.remove()
    return None


def linears_read_by_routers(module: nn.Module) -> list[nn.Module]:
    """The linears below `module` that are not called: routers multiply by their weights."""
    routers = [child for child in module.modules() if isinstance(child, OwnForward) and child._multiplied]
    return [router.get_submodule(router._multiplied) for router in routers]


def names_a_gate(module: nn.Module) -> bool:
    """Whether the forward of a module's class calls a function of `_GATES` itself."""
    return not _GATES.isdisjoint(names_in_forward(module))


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
        owner = self.get_submodule(self._multiplied)
        (group,) = getattr(self, "_groups", (None,)) if owner is self else (getattr(owner, "_group", None),)
        with _RowInvariantCalls(owner, group):
            return cls.forward(self, *args, **kwargs)

    return type(cls.__name__, (OwnForward, cls), {"forward": forward, "__module__": cls.__module__})


class _RowInvariantCalls(TorchFunctionMode):
    """Replaces calls inside one forward; `group` multiplies by the weight of `module`, if the forward does."""

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
    **dict.fromkeys((torch.softmax, Tensor.softmax, F.softmax), _softmax),
    **dict.fromkeys((torch.sum, Tensor.sum), _sum),
}
