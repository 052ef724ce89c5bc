"""Latent attention whose indexer chooses the positions that queries attend to (DeepSeek-V3.2, GLM-5).

    the indexer's forward     queries, keys and weights ──> an `Index`, in place of the positions
    the attention function    the `Index` ──> scores of the context ──> attention over the positions chosen

Keys of indexers are cached next to latents. Layers without an indexer read the `Index` of one before them (GLM-5).
Indexers are recognised by a trial of their forward: scores are sum(weights * relu(q @ k * scale)), of queries and keys
whose first channels are rotated, by halves or by pairs. As in transformers, nothing has a gradient through them.
"""

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.indexed_attention import ChosenSlots
from rollout_engine.model.modules.forward_trial import Forward, require, unmatched_reason, waves
from rollout_engine.model.modules.latent_attention import LatentAttention

Rotation = Literal["halves", "pairs"]
_TRIAL = dict(n_heads=24, head_dim=10, qk_rope_head_dim=6, index_topk=12, softmax_scale=0.37)
"""Sizes of a trial, with enough heads that no score is zero."""
_TRIAL_LENGTH = 12
_ARGUMENTS = ["hidden_states", "q_resid", "position_embeddings", "attention_mask", "position_ids", "past_key_values"]
"""Arguments of an indexer's forward."""


class Index:
    """The results of an indexer for a batch, by which attention chooses positions once for all layers that read it."""

    def __init__(
        self, layer: int, q: Tensor, keys: Tensor, weights: Tensor, *, topk: int, scale: float, positions: Tensor | None
    ) -> None:
        self.layer = layer
        """The layer that caches its keys."""
        self.q, self.keys, self.weights = q, keys, weights
        """[B, T, H, D], [B, T, D] and float32 [B, T, H]."""
        self.topk, self.scale, self.positions = topk, scale, positions
        """`positions`: the position_ids of the batch."""
        self._chosen: list[ChosenSlots | None] = []

    def choose_slots(self, choose: Callable[["Index"], ChosenSlots | None]) -> ChosenSlots | None:
        """The result of `choose`, which is called the first time: slots, or None if all positions are chosen."""
        if not self._chosen:
            self._chosen.append(choose(self))
        return self._chosen[0]


class _Unmasked:
    """Replaces a mask: every part of it masks nothing but later positions."""

    def __getitem__(self, part: object) -> None:
        return None


UNMASKED = _Unmasked()
"""The mask that attention with an index gives to the attention function."""


class IndexedAttention:
    """Mixed into the class of a module of latent attention with an index."""


class Indexer:
    """Mixed into the class of an indexer: its forward returns an `Index`."""

    rotation: Rotation

    @torch.no_grad()
    def forward(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: object,
        position_ids: Tensor | None,
        past_key_values: None = None,
    ) -> Index:
        if past_key_values is not None:
            raise ConfigError(
                f"{type(self).__name__} was given a cache, but an exact model computes whole sequences. Pass "
                "use_cache=False, or generate with the engine."
            )
        own: Any = self
        q, keys, weights = _project(own, self.rotation, hidden_states, q_resid, position_embeddings)
        options = dict(topk=own.index_topk, scale=own.softmax_scale, positions=position_ids)
        return Index(own.layer_idx, q, keys, weights, **options)


def index_attention(module: nn.Module) -> None:
    """Have every module of latent attention below `module` that has an indexer of a known kind attend by it, in place.

    Call `cache_latents` before. Parameters and their names stay as they are.
    """
    attentions: list[Any] = [child for child in module.modules() if isinstance(child, LatentAttention)]
    for child in attentions:
        if isinstance(child, IndexedAttention) or not _has_index(child):
            continue
        indexer, kind = child._modules.get("indexer"), child.__class__
        rotation = None if indexer is None else find_rotation(indexer)
        if indexer is not None and rotation is not None:
            indexer.__class__ = _indexer_class(indexer.__class__, rotation)
        if indexer is None or rotation is not None:
            child.__class__ = _attention_class(kind)


def has_indexers(module: nn.Module) -> bool:
    """Whether attention below `module` has an indexer, be it served or not."""
    return any("indexer" in child._modules for child in module.modules())


def unserved_indexers(module: nn.Module) -> list[str]:
    """Why indexers below `module` are not served, each reason once."""
    found: dict[str, None] = {}
    for child in module.modules():
        if "indexer" in child._modules and not isinstance(child, IndexedAttention):
            indexer: Any = child._modules["indexer"]
            reason = None if indexer is None else indexer_reason(indexer)
            found[reason or f"{type(child).__name__} has an indexer, and its keys and values are not latents"] = None
    return list(found)


def find_rotation(indexer: nn.Module) -> Rotation | None:
    """How `indexer` rotates; None if it does not compute as DeepSeek-V3.2's."""
    return next((each for each in get_args(Rotation) if _trial_reason(indexer, each) is None), None)


def indexer_reason(indexer: nn.Module) -> str | None:
    """Why `indexer` does not compute as DeepSeek-V3.2's; None if it does."""
    return None if find_rotation(indexer) is not None else _trial_reason(indexer, "halves")


def check_scores(module: nn.Module, index: Index, *, plain: bool) -> None:
    """Raise `ConfigError` if attention of `module` has more than an index: a window, a soft cap or sinks."""
    if not plain:
        raise ConfigError(
            f"{type(module).__name__} chooses {index.topk} positions by an indexer, and has a window, a soft cap or "
            "sinks. Only attention without these is served with an indexer."
        )


def _has_index(attention: nn.Module) -> bool:
    return "indexer" in attention._modules or getattr(attention, "skip_topk", False) is True


def _project(
    parts: Any, rotation: Rotation, hidden: Tensor, q_resid: Tensor, embeddings: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, T, H, D], keys [B, T, D] and weights float32 [B, T, H] of an indexer with these parts."""
    size, rotate = parts.qk_rope_head_dim, _rotate_halves if rotation == "halves" else _rotate_pairs
    cos, sin = (x.unsqueeze(2) for x in embeddings)
    rotated = []
    for x in (parts.wq_b(q_resid).unflatten(-1, (-1, parts.head_dim)), parts.k_norm(parts.wk(hidden)).unsqueeze(2)):
        rotated.append(torch.cat((rotate(x[..., :size], cos, sin), x[..., size:]), -1))
    weights = parts.weights_proj(hidden.to(parts.weights_proj.weight.dtype)).float() * parts.n_heads**-0.5
    return rotated[0], rotated[1].squeeze(2), weights


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs lie side by side, and apart in the result."""
    first, second = x[..., 0::2], x[..., 1::2]
    cos, sin = (each[..., : first.shape[-1]] for each in (cos, sin))
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class _Product:
    """Replaces a linear in a trial: its results do not depend on its input."""

    def __init__(self, name: str, size: int, inputs: Tensor, phase: float) -> None:
        self.weight, self._name, self._inputs = torch.empty(0), name, inputs
        self._result = waves(1, _TRIAL_LENGTH, size, phase=phase)

    def __call__(self, x: Tensor) -> Tensor:
        require(x is self._inputs, f"multiplies something else by {self._name}")
        return self._result.clone()


class _Norm:
    """Replaces the norm of keys in a trial."""

    weight = torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        return x * 1.5 + 0.1


def _trial_reason(indexer: nn.Module, rotation: Rotation) -> str | None:
    """Why the forward of `indexer` does not order positions as ours does, which rotates so."""
    taken = [*inspect.signature(type(indexer).forward).parameters][1:]
    if taken != _ARGUMENTS:
        return f"{type(indexer).__name__} takes {', '.join(taken)}, and DeepSeek-V3.2's {', '.join(_ARGUMENTS)}"
    heads, dim, rope = (int(_TRIAL[name]) for name in ("n_heads", "head_dim", "qk_rope_head_dim"))
    hidden, resid = (waves(1, _TRIAL_LENGTH, 5, phase=phase) for phase in (0.1, 0.4))

    def run(forward: Forward) -> None:
        half = waves(1, _TRIAL_LENGTH, rope // 2, phase=0.9)
        angles = torch.cat((half, half), -1)
        parts: Any = _TRIAL | dict(
            wq_b=_Product("wq_b", heads * dim, resid, 0.3),
            wk=_Product("wk", dim, hidden, 0.8),
            k_norm=_Norm(),
            weights_proj=_Product("weights_proj", heads, hidden, 0.6),
        )
        embeddings = angles.cos(), angles.sin()
        given = torch.zeros(1, _TRIAL_LENGTH, _TRIAL_LENGTH), torch.arange(_TRIAL_LENGTH)[None]
        found = forward(parts, hidden, resid, embeddings, *given)
        q, keys, weights = _project(_Parts(parts), rotation, hidden, resid, embeddings)
        products = torch.einsum("bthd,bsd->bths", q, keys) * _TRIAL["softmax_scale"]
        scores = torch.einsum("bth,bths->bts", weights, products.relu())
        wanted = scores.argsort(-1, descending=True)
        same = isinstance(found, Tensor) and found.shape == wanted.shape and torch.equal(found.long(), wanted)
        require(same, "orders positions by other scores")

    return unmatched_reason("indexer", indexer, run)


class _Parts:
    """The parts of a trial as attributes."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self.__dict__.update(parts)


@cache
def _indexer_class(kind: type[nn.Module], rotation: Rotation) -> type[nn.Module]:
    return type(kind.__name__, (Indexer, kind), {"rotation": rotation, "__module__": kind.__module__})


@cache
def _attention_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A class like `kind` that needs no mask to choose positions."""

    @wraps(kind.forward)  # by which parts of it are recognised
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = UNMASKED
        return kind.forward(self, *args, **kwargs)

    return type(f"Indexed{kind.__name__}", (IndexedAttention, kind), {"forward": forward})
