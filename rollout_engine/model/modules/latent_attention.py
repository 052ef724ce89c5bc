"""Multi-head latent attention (DeepSeek-V2, section 2.1) that caches latents in place of expanded keys and values.

    the module's forward     latent, rotated key ──> expand_kv ──> one key for all heads, whose value is the latent
    the attention function   q ──> absorb ──> attention over latents, which are cached ──> expand ──> values of heads

Modules are recognised by a trial of their `expand_kv`, which expands latents into the keys and values of heads. Engines
and exact trainers both compute this form. Its results differ from those of expanded keys by round-off.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels import latent
from rollout_engine.kernels.cpu.attention import are_latents
from rollout_engine.model.modules.forward_trial import (
    NUM_TOKENS,
    Forward,
    require,
    require_same,
    unmatched_reason,
    waves,
)
from rollout_engine.model.packing.head_groups import HeadGroup

_SIZES = ("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim")
_NUM_HEADS = 3
"""Heads of a trial."""


class LatentProducts(Protocol):
    """The products around attention over latents, by the matrix that would expand them."""

    value_size: int
    """Channels of a head's value."""

    def absorb(self, query: Tensor) -> Tensor:
        """Queries [B, H, T, N + P] -> [B, H, T, R + P], which meet latents and rotated keys."""
        ...

    def expand(self, mixed: Tensor) -> Tensor:
        """Mixed latents [B, T, H, R] -> values [B, T, H, V]."""
        ...


class LatentProjection(nn.Linear):
    """The linear from latents to the keys and values of all heads, whose weight is [H * (N + V), R]."""

    nope_size: int
    value_size: int
    kernels: latent.LatentKernels | None = None
    """Those of a device; None: a CPU's, by packed weights if there are."""
    find_adapters: Callable[[], Sequence[latent.LatentAdapter]] | None = None
    """Finds the adapters of the rows that are computed now; in the engine alone."""
    _head_groups: tuple[HeadGroup, HeadGroup] | tuple[()]
    """The packed products of `absorb` and `expand` on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        raise ConfigError("kv_b_proj was called, and latents are not expanded here. Use attention's own forward.")

    def by_head(self, weight: Tensor) -> Tensor:
        """`weight` [H * (N + V), ...] as [H, N + V, ...]."""
        result: Tensor = weight.unflatten(0, (-1, self.nope_size + self.value_size))
        return result

    def absorb(self, query: Tensor) -> Tensor:
        product = partial(latent.absorb, kernel=self._find_kernels()[0])
        return self._by_rows(query.transpose(1, 2), product, latent.LatentAdapter.absorb).transpose(1, 2)

    def expand(self, mixed: Tensor) -> Tensor:
        product = partial(latent.expand, kernel=self._find_kernels()[1])
        return self._by_rows(mixed, product, latent.LatentAdapter.expand)

    def _find_kernels(self) -> tuple[latent.Kernel | None, latent.Kernel | None]:
        """The forwards of `absorb` and `expand`; None: by the plain weight."""
        if self.kernels is not None or not self._head_groups:
            return self.kernels or (None, None)
        absorbing, expanding = (group.packed_heads() for group in self._head_groups)
        return (
            None if absorbing is None else latent.absorb_packed(absorbing),
            None if expanding is None else latent.expand_packed(expanding),
        )

    def _by_rows(self, x: Tensor, product: Callable[..., Tensor], add: Callable[..., Tensor]) -> Tensor:
        """`product` of x [B, T, H, D], with the adapters that rows have."""
        rows = x.flatten(0, 1)
        out = product(rows, self.by_head(self.weight), self.nope_size)
        for adapter in self.find_adapters() if self.find_adapters is not None else ():
            out[adapter.rows] = add(adapter, rows[adapter.rows], out[adapter.rows], self.nope_size)
        result: Tensor = out.unflatten(0, x.shape[:2])
        return result


class LatentAttention:
    """Mixed into the class of an attention module: it hands latents to the attention function."""

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [B, 1, T, R] and rotated keys [B, 1, T, P] -> both [B, 1, T, R + P], and its view of the latents."""
        keys = torch.cat((kv_nope, k_rot), -1)
        return keys, keys[..., : kv_nope.shape[-1]]


def cache_latents(module: nn.Module) -> None:
    """Have every attention module below `module` that expands latents cache these instead, in place.

    Parameters and their names stay as they are.
    """
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    for child in list(module.modules()):
        if not hasattr(child, "expand_kv") or isinstance(child, LatentAttention) or latent_reason(child) is not None:
            continue
        linear: Any = child.kv_b_proj
        if linear.weight.dtype == dtype:
            linear.__class__ = LatentProjection
            linear.nope_size, linear.value_size, _ = (getattr(child, name) for name in _SIZES)
            linear._head_groups = HeadGroup([linear]), HeadGroup([linear], expands=True)
            child.__class__ = _latent_class(type(child))  # type: ignore[arg-type]  # mypy doubts that it has a hash


def use_latent_kernels(module: nn.Module, kernels: latent.LatentKernels) -> None:
    """Have every attention below `module` that caches latents multiply by `kernels`, in place."""
    for child in module.modules():
        if isinstance(child, LatentProjection):
            child.kernels, child._head_groups = kernels, ()


def has_latents(module: nn.Module) -> bool:
    """Whether an attention module below `module` caches latents."""
    return any(isinstance(child, LatentAttention) for child in module.modules())


def latent_reason(attention: nn.Module) -> str | None:
    """Why `attention` does not expand latents by one product into keys and values of its heads; None if it does."""
    linear: Any = attention._modules.get("kv_b_proj")
    sizes = [getattr(attention, name, None) for name in _SIZES]
    if type(linear) is not nn.Linear or linear.bias is not None:
        return "it has no linear kv_b_proj without a bias"
    nope, value, rope = (size if isinstance(size, int) else 0 for size in sizes)
    if min(nope, value, rope) < 1 or linear.out_features % (nope + value):
        return f"its sizes {', '.join(_SIZES)} are {sizes}, and kv_b_proj has {linear.out_features} outputs"

    def run(forward: Forward) -> None:
        latents, rotated = (waves(1, 1, NUM_TOKENS, size, phase=0.2) for size in (linear.in_features, rope))
        product = waves(1, 1, NUM_TOKENS, _NUM_HEADS * (nope + value), phase=0.7)
        seen: list[Tensor] = []

        def project(x: Tensor) -> Tensor:
            seen.append(x)
            return product.clone()

        keys, values = forward({"kv_b_proj": project}, latents, rotated)
        require(len(seen) == 1, f"multiplies {len(seen)} times")
        require_same(seen[0], latents, "changes latents")
        by_head = product.view(1, NUM_TOKENS, _NUM_HEADS, -1).transpose(1, 2)
        wanted = torch.cat((by_head[..., :nope], rotated.expand(-1, _NUM_HEADS, -1, -1)), -1)
        require_same(keys, wanted, "makes other keys")
        require_same(values, by_head[..., nope:], "makes other values")

    return unmatched_reason("latents", attention, run, "expand_kv")


def products_of(module: nn.Module, key: Tensor, value: Tensor) -> LatentProducts | None:
    """The products around attention of `module`, which has been given `key` and `value`; None: these are expanded.

    Raises `ConfigError` if they are not those that its `expand_kv` returns.
    """
    if not isinstance(module, LatentAttention):
        return None
    if not are_latents(key, value):
        raise ConfigError(
            f"{type(module).__name__} changes its latents before attention: keys are {list(key.shape)}, values "
            f"{list(value.shape)}, and should be a view of their first channels. It cannot be served."
        )
    products: Any = module.kv_b_proj
    if not hasattr(products, "absorb"):
        raise ConfigError(
            f"{type(module).__name__}: kv_b_proj is a {type(products).__name__} now, by which latents cannot be read. "
            "Call exact.enable(model) after it was replaced, as by a LoRA."
        )
    return products  # type: ignore[no-any-return]


@cache
def _latent_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Latent{kind.__name__}", (LatentAttention, kind), {})
