"""The products and scores of a CPU inside forwards of foreign modules (`modules.own_forwards`)."""

from collections.abc import Iterator

from torch import Tensor, nn

from rollout_engine.kernels.cpu import experts as kernels
from rollout_engine.kernels.cpu import gemm
from rollout_engine.model.modules.own_forwards import RowScores, swap_own_router
from rollout_engine.model.packing.linear_groups import LinearGroup, RowInvariantLinear, swap_linears
from rollout_engine.model.packing.module_types import tensor_of

SCORES = RowScores(kernels.scores, kernels.supports)


def swap_router_calls(module: nn.Module) -> None:
    """Do as `modules.own_forwards.swap_own_router`, with packed products."""
    product = swap_own_router(module, SCORES, _products_by)
    if not isinstance(product, _PackedProduct):
        return
    if product.owner is module:
        module._groups = [product.group]  # type: ignore[assignment]
    else:
        product.group.unpack()
        swap_linears(module)
        product.group.float32_out = product.float32_out


def _products_by(owner: nn.Module) -> Iterator["_PackedProduct"]:
    for wide in (False, True) if gemm.supports(tensor_of(owner).dtype) else (False,):
        yield _PackedProduct(owner, float32_out=wide)


class _PackedProduct:
    """Satisfies `modules.own_forwards.OwnProduct`."""

    def __init__(self, owner: nn.Module, *, float32_out: bool) -> None:
        self.owner, self.float32_out = owner, float32_out
        self._group = LinearGroup([_OwnWeight(owner)])  # type: ignore[list-item]  # has all that groups read
        self._group.float32_out = float32_out

    @property
    def group(self) -> LinearGroup:
        """That of the linear, which may be regrouped, once it is swapped."""
        return self.owner._group if isinstance(self.owner, RowInvariantLinear) else self._group

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        (out,) = self.group.product(rows, [weight], [] if bias is None else [bias])
        return out


class _OwnWeight:
    """The weight and bias of a module, with the attributes of a linear."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.out_features = self.weight.shape[0]

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], read each time, because the parameter may have been replaced."""
        return tensor_of(self._module)

    @property
    def bias(self) -> Tensor | None:
        """[out_features]; None without one."""
        found: Tensor | None = getattr(self._module, "bias", None)
        return found
