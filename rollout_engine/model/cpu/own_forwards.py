"""The products and scores of a CPU inside forwards of foreign modules (`modules.own_forwards`)."""

from torch import Tensor, nn

from rollout_engine.kernels.cpu import experts as kernels
from rollout_engine.kernels.cpu import gemm
from rollout_engine.model.modules.own_forwards import RowScores, swap_own_router
from rollout_engine.model.packing.linear_groups import LinearGroup
from rollout_engine.model.packing.module_types import tensor_of

SCORES = RowScores(kernels.scores, kernels.supports)


def swap_router_calls(module: nn.Module) -> None:
    """Do as `modules.own_forwards.swap_own_router`, with packed products."""
    weight = getattr(module, "weight", None)
    has_sums = isinstance(weight, Tensor) and gemm.supports(weight.dtype)
    products = (_PackedProduct(module, float32_out=wide) for wide in ((False, True) if has_sums else (False,)))
    if isinstance(product := swap_own_router(module, SCORES, products), _PackedProduct):
        module._groups = [product.group]  # type: ignore[assignment]


class _PackedProduct:
    """Satisfies `modules.own_forwards.OwnProduct`."""

    def __init__(self, module: nn.Module, *, float32_out: bool) -> None:
        self.group = LinearGroup([_OwnWeight(module)])  # type: ignore[list-item]  # has all that groups read
        self.group.float32_out = self.float32_out = float32_out

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        (out,) = self.group.product(rows, [weight], [] if bias is None else [bias])
        return out


class _OwnWeight:
    """The weight and bias of a module that is no linear, with the attributes of one."""

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
