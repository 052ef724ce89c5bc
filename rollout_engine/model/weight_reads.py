"""Which weights a forward reads beside our own products: one forward is watched.

Hugging Face's code may multiply by `linear.weight` itself, as some routers do, and never call the linear. Such a weight
must keep its plain values: torch does not always refuse a product with a tensor on meta, and what comes out is then
whatever the memory held.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollout_engine.model.fusion import without_products


def storages_read(module: nn.Module) -> set[int]:
    """Addresses of the storages that one forward of two tokens of a causal LM reads; our own products left out."""
    with torch.no_grad(), without_products(module), _Watch() as watch:
        module(input_ids=torch.tensor([[0, 1]]), use_cache=False)
    return watch.storages


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:  # a view alone reads nothing, and whoever reads the view is seen
            tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self.storages.update(tensor.untyped_storage().data_ptr() for tensor in tensors)
        return func(*args, **(kwargs or {}))
