"""Forwards of foreign modules in which some of torch's functions are replaced by row-invariant ones of a device.

A router that no formula of `modules.experts` describes, and a module that gates by a sigmoid or a softplus, keep the
forward of their own class. Inside, these calls are replaced, gradients included; all others are torch's, and the row
trial decides whether their rows depend on the batch:

    linear(x, w), w the router's own weight     our product; float32 sums if the module casts x and w to float32; w may
                                                be that of a linear below the router which is not called
    sigmoid, softplus, silu, softmax            `kernels.activation`, the device's scores
    sum over a few elements of each row         in their order
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollout_engine.kernels import activation
from rollout_engine.model.modules.experts import ScoresKernel, scores, sum_in_order
from rollout_engine.model.modules.module_patterns import names_in_forward
from rollout_engine.model.modules.routers import call_router

_LARGEST_SUM = 64
"""Most elements that are added one after the other."""
_GATES = {"sigmoid", "softplus", "silu"}
"""Functions that some modules apply to the output of a linear, and whose last elements torch computes otherwise."""
_TABLE = "ACT2FN"
"""Transformers' table of activations, from which forwards inside a mixer take others."""


class RowScores(NamedTuple):
    """Softmaxes of rows on one kind of device."""

    kernel: ScoresKernel
    supports: Callable[[Tensor], bool]
    """Whether the kernel takes a tensor."""


class OwnProduct(Protocol):
    """A product by the weight of a router, or of a linear below it that is not called."""

    float32_out: bool
    """Whether its results are float32 sums, whatever the dtype of the weight."""

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """rows [R, K], that weight [N, K] and bias [N] -> [R, N], differentiable."""
        ...


class OwnForward(nn.Module):
    """A module of a foreign class that computes its own forward with row-invariant calls."""

    _own_product: OwnProduct | None = None
    """The product of a router by a weight; no other module has one."""
    _multiplied: str = ""
    """Name of the linear below a router by whose weight it multiplies; "": the router itself."""


def swap_own_router(
    module: nn.Module, row_scores: RowScores, products_by: Callable[[nn.Module], Iterable[OwnProduct]]
) -> OwnProduct | None:
    """Give a router the row-invariant calls that its forward needs, in place; or leave it as it is.

    `products_by`: products by the weight of the router, or of a linear. It is left if its forward does not multiply by
    its weight once, as one of them does. Returns that one.
    """
    linears = [(name, child) for name, child in module.named_modules() if type(child) is nn.Linear]
    has_weight = isinstance(weight := getattr(module, "weight", None), nn.Parameter) and weight.dim() == 2
    for name, owner in [("", module)] if has_weight else linears:
        for product in products_by(owner):
            if _multiplies_once(module, owner, row_scores, product):
                swap_calls(module, row_scores)
                router: Any = module
                router._own_product, router._multiplied = product, name
                return product
    if not has_weight:  # its product is the forward of a linear
        swap_calls(module, row_scores)
    return None


def _multiplies_once(router: nn.Module, owner: nn.Module, row_scores: RowScores, product: OwnProduct) -> bool:
    """Whether a router multiplies by the weight of `owner`, itself or a linear below it, as `product` does, and once.

    The products of a linear that is called are its own.
    """
    was_called: list[bool] = []
    handle = owner.register_forward_pre_hook(lambda *_: was_called.append(True))
    calls = _RowInvariantCalls(owner, row_scores, product)
    try:
        with calls:
            call_router(router)
    finally:
        handle.remove()
    return calls.num_products == 1 and not was_called


def linears_read_by_routers(module: nn.Module) -> list[nn.Module]:
    """The linears below `module` that are not called: routers multiply by their weights."""
    routers = [child for child in module.modules() if isinstance(child, OwnForward) and child._multiplied]
    return [router.get_submodule(router._multiplied) for router in routers]


def names_a_gate(module: nn.Module) -> bool:
    """Whether the forward of a module's class calls a function of `_GATES` itself."""
    return not _GATES.isdisjoint(names_in_forward(module))


def names_an_activation(module: nn.Module) -> bool:
    """Whether that forward calls one of `_GATES`, or an activation of transformers' table."""
    return not (_GATES | {_TABLE}).isdisjoint(names_in_forward(module))


def swap_calls(module: nn.Module, row_scores: RowScores) -> None:
    """Give the forward of a module row-invariant calls, in place."""
    kind: Any = type(module)  # mypy does not see that classes can be hashed
    module.__class__ = _with_own_forward(kind, row_scores)


@cache
def _with_own_forward(cls: type[nn.Module], row_scores: RowScores) -> type[nn.Module]:
    """A class like `cls` whose forward runs with row-invariant calls."""

    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        owner = self.get_submodule(self._multiplied)
        with _RowInvariantCalls(owner, row_scores, self._own_product):
            return cls.forward(self, *args, **kwargs)

    return type(cls.__name__, (OwnForward, cls), {"forward": forward, "__module__": cls.__module__})


class _RowInvariantCalls(TorchFunctionMode):
    """Replaces calls inside one forward of `module`, whose weight is multiplied by `product`, if it has one."""

    def __init__(self, module: nn.Module, row_scores: RowScores, product: OwnProduct | None) -> None:
        super().__init__()
        self._module, self._scores, self._product = module, row_scores, product
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}
        """(Result, source) of each cast to float32, by the id of the result, which this keeps alive."""
        self.num_products = 0
        """Products by the weight that were replaced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            result = self._multiply(*args, **kwargs)
        elif func in _SOFTMAXES:
            result = self._softmax(args, kwargs)
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
        product, own = self._product, self._source(weight)
        if product is None or own is not self._module.weight or bias is not getattr(self._module, "bias", None):
            return NotImplemented
        is_cast = own is not weight
        rows = self._source(input) if is_cast else input
        if is_cast != product.float32_out or rows.dtype != own.dtype:
            return NotImplemented
        self.num_products += 1
        out = product(rows.reshape(-1, rows.shape[-1]), own, bias)
        return out.view(*rows.shape[:-1], out.shape[-1])

    def _source(self, tensor: Tensor) -> Tensor:
        """The tensor that `tensor` was cast from, or itself."""
        return self._casts.get(id(tensor), (None, tensor))[1]

    def _softmax(self, args: Any, kwargs: Mapping[str, Any]) -> Any:
        x, dim, dtype = _bind_arguments(args, kwargs)
        is_known = dim in (-1, x.dim() - 1) and dtype in (None, x.dtype, torch.float32)
        if not is_known or not self._scores.supports(x):
            return NotImplemented
        rows = scores(x.reshape(-1, x.shape[-1]), self._scores.kernel, is_sigmoid=False)
        return rows.view(x.shape).to(dtype or x.dtype)


def _elementwise(function: Callable[[Tensor], Tensor]) -> Callable[[Any, Mapping[str, Any]], Any]:
    """Replaces a call that has its input as the only argument."""

    def replace(args: Any, kwargs: Mapping[str, Any]) -> Any:
        return function(args[0]) if len(args) == 1 and not kwargs and args[0].is_floating_point() else NotImplemented

    return replace


def _plain_silu(args: Any, kwargs: Mapping[str, Any]) -> Any:
    is_plain = len(args) == 1 and not kwargs.get("inplace") and args[0].is_floating_point()
    return activation.silu(args[0]) if is_plain else NotImplemented


def _silu(input: Tensor, inplace: bool = False) -> Tensor:
    return activation.silu(input)


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


class RowInvariantElements(TorchFunctionMode):
    """Replaces torch's functions of each element that have other bits at the end of a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _ELEMENTWISE.get(func, func)(*args, **(kwargs or {}))


_CASTS = {Tensor.to, Tensor.type, Tensor.float}
_SOFTMAXES = {torch.softmax, Tensor.softmax, F.softmax}
_ELEMENTWISE = {**dict.fromkeys((torch.sigmoid, Tensor.sigmoid), activation.sigmoid), F.silu: _silu}
_REPLACED: dict[Any, Callable[[Any, Mapping[str, Any]], Any]] = {
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid), _elementwise(activation.sigmoid)),
    F.softplus: _elementwise(activation.softplus),
    F.silu: _plain_silu,
    **dict.fromkeys((torch.sum, Tensor.sum), _sum),
}
