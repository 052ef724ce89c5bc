"""LoRA layers of the package peft on a trainer, computed as the engine computes an adapter.

PEFT itself is not imported: its layers are recognised by their attributes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.adapters import Added, add_adapter
from rollout_engine.kernels.latent import LatentAdapter
from rollout_engine.model.modules.latent_attention import LatentProjection


def plain_model(model: nn.Module) -> nn.Module:
    """The causal LM inside a `PeftModel`; any other model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model  # type: ignore[operator]


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the layers that LoRA layers wrap stand in their place."""
    wrapped = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if _is_lora(child)
    ]
    for parent, name, child in wrapped:
        parent._modules[name] = child.base_layer  # type: ignore[assignment]
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


def active_adapters(model: nn.Module) -> frozenset[str | None]:
    """Names of the adapters that are added to linears now; None among them alone: there is none."""
    layers: list[Any] = [child for child in model.modules() if _is_lora(child)]
    on = [layer for layer in layers if not layer.disable_adapters and not layer.merged]
    names: set[str | None] = {name for layer in on for name in layer.active_adapters if name in layer.lora_A}
    return frozenset(names or {None})


def known_adapters(model: nn.Module) -> frozenset[str]:
    """Names of all adapters of linears, active or not."""
    layers: list[Any] = [child for child in model.modules() if _is_lora(child)]
    return frozenset(name for layer in layers for name in layer.lora_A)


def make_adapters_exact(model: nn.Module, kernel: Added) -> None:
    """Have every LoRA layer of a linear compute its adapter by the engine's own product, `kernel`, in place."""
    for child in model.modules():
        if _is_lora(child) and not isinstance(child, ExactAdapter):
            of_latents = isinstance(child.base_layer, LatentProjection)
            child.__class__ = _exact_class(type(child), kernel, of_latents)  # type: ignore[arg-type]  # mypy doubts that it has a hash


class ExactAdapter:
    """Mixed into a LoRA layer's class: one plain active adapter is computed as in the engine, others as before."""

    adapter_kernel: ClassVar[Added]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = None if args or kwargs else self.exact_adapter
        if name is None:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc,no-any-return]
        layer: Any = self
        out = layer.base_layer(x)
        with torch._C.DisableTorchFunction():  # inside `TowerArithmetic` each call of torch would pass through Python
            rows = add_adapter(
                x.reshape(-1, x.shape[-1]),
                out.reshape(-1, out.shape[-1]),
                layer.lora_A[name].weight,
                layer.lora_B[name].weight,
                layer.scaling[name],
                kernel=type(self).adapter_kernel,
            )
            return rows.view(out.shape)

    @property
    def exact_adapter(self) -> str | None:
        """The only active adapter, if the engine can compute it: plain LoRA without biases and dropout."""
        layer: Any = self
        active = [name for name in layer.active_adapters if name in layer.lora_A]
        if layer.disable_adapters or layer.merged or len(active) != 1:
            return None
        [name] = active
        dropout = layer.lora_dropout[name] if name in layer.lora_dropout else None
        drops = isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0
        has_bias = any(matrix[name].bias is not None for matrix in (layer.lora_A, layer.lora_B))
        is_variant = name in getattr(layer, "lora_variant", ())
        return None if drops or has_bias or is_variant else str(name)


class ExactLatentAdapter(ExactAdapter):
    """Mixed into the class of a LoRA layer of a projection of latents. Satisfies `latent_attention.LatentProducts`."""

    @property
    def value_size(self) -> int:
        layer: Any = self
        size: int = layer.base_layer.value_size
        return size

    def absorb(self, query: Tensor) -> Tensor:
        layer: Any = self
        out: Tensor = layer.base_layer.absorb(query)
        rows, absorbed = (x.transpose(1, 2).flatten(0, 1) for x in (query, out))
        added = self._add_adapter(rows, absorbed, LatentAdapter.absorb)
        return out if added is None else added.unflatten(0, (len(query), -1)).transpose(1, 2)

    def expand(self, mixed: Tensor) -> Tensor:
        layer: Any = self
        out: Tensor = layer.base_layer.expand(mixed)
        added = self._add_adapter(mixed.flatten(0, 1), out.flatten(0, 1), LatentAdapter.expand)
        return out if added is None else added.unflatten(0, mixed.shape[:2])

    def _add_adapter(self, rows: Tensor, out: Tensor, add: Callable[..., Tensor]) -> Tensor | None:
        """`out` with the adapter; None if none is active. Raises `ConfigError` for any but one plain LoRA."""
        layer: Any = self
        name = self.exact_adapter
        if name is None:
            has_none = not any(each in layer.lora_A for each in layer.active_adapters)
            if layer.disable_adapters or layer.merged or has_none:
                return None
            raise ConfigError(
                "kv_b_proj has an adapter that is not one plain LoRA (several are active, or it has dropout, a bias or "
                "a variant), and latents are read by no other. Leave kv_b_proj out of its target_modules."
            )
        base, dtype = layer.base_layer, rows.dtype
        a, b = layer.lora_A[name].weight.to(dtype), layer.lora_B[name].weight.to(dtype)
        return add(LatentAdapter(a, base.by_head(b), layer.scaling[name]), rows, out, base.nope_size)


@cache
def _exact_class(kind: type[nn.Module], kernel: Added, of_latents: bool) -> type[nn.Module]:
    mixed = ExactLatentAdapter if of_latents else ExactAdapter
    return type(f"Exact{kind.__name__}", (mixed, kind), {"adapter_kernel": staticmethod(kernel)})


def _is_lora(child: nn.Module) -> bool:
    """Whether it is a linear layer with LoRA matrices."""
    parts = ("lora_A", "lora_B", "lora_dropout", "scaling", "active_adapters", "disable_adapters", "merged")
    return isinstance(child._modules.get("base_layer"), nn.Linear) and all(hasattr(child, part) for part in parts)
