"""Finds the weights that a forward reads other than by our own products, by watching one forward.

Hugging Face's code may multiply by `linear.weight` without calling the linear, as some routers do. Such a weight must
keep its plain values: torch does not always refuse a product with a tensor on meta, and then returns garbage.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollout_engine.model.packing.linear_groups import without_products


def storages_read(module: nn.Module) -> set[int]:
    """Addresses of the storages that a forward of two tokens of a causal LM reads, except by our own products."""
    watch = _Watch()
    with torch.no_grad(), without_products(module), watch:
        module(input_ids=torch.tensor([[0, 1]]), use_cache=False)
    return watch.storages


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:  # views read nothing; reads through them are seen
            tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self.storages.update(tensor.untyped_storage().data_ptr() for tensor in tensors)
        return func(*args, **(kwargs or {}))
