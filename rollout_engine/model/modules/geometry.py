"""The shapes and parameters of each layer's attention and states, learnt by watching one forward.

Nothing is read from the configuration: a probe replaces attention, mask construction and the functions of mixers, and
records their arguments.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.model.modules.indexed_attention import Index
from rollout_engine.model.modules.latent_attention import products_of
from rollout_engine.model.modules.state_geometry import StateCall, StateGeometry, recording_states, states_by_layer

_PROBE_NAME = "rollout_engine_probe"
_NUM_TOKENS = 6
_FAR = 1 << 20
"""A position beyond any limit that a mask may have without naming it."""
HARMLESS_TENSORS = {"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "logits_to_keep"}
"""Tensors that modules pass to attention and that follow from positions, or choose the rows of a head."""


class LayerGeometry(msgspec.Struct, frozen=True):
    """One layer: query head h reads key/value head h // (num_heads // num_kv_heads). Without attention all are 0."""

    num_heads: int
    num_kv_heads: int
    head_dim_k: int
    """Head size of queries and keys."""
    head_dim_v: int
    scale: float
    """Scores are q @ k * scale."""
    sliding_window: int | None
    """Key j is visible to query i if 0 <= i - j < sliding_window; None: every j <= i."""
    softcap: float | None
    """c: scores become c * tanh(scores / c)."""
    has_sinks: bool
    """One learned logit per head joins the softmax and is dropped from the result."""
    has_latents: bool = False
    """All heads share one key, whose first `head_dim_v` channels are the value: only keys are cached."""
    kv_layer: int | None = None
    """The earlier layer whose keys and values it reads; None: its own."""
    state: StateGeometry | None = None
    """The states that it keeps of a sequence; None: it keeps none."""
    index_topk: int = 0
    """A query attends to this many positions at most, which an indexer chooses; 0: to all that are visible."""
    index_dim: int = 0
    """Channels of the key that its own indexer caches; 0: it has none, or reads the choice of an earlier layer."""

    @classmethod
    def without_attention(cls, state: StateGeometry | None) -> "LayerGeometry":
        """A layer that keeps a state alone, or computes each token separately."""
        return cls(0, 0, 0, 0, scale=1.0, sliding_window=None, softcap=None, has_sinks=False, state=state)

    @property
    def attends(self) -> bool:
        """Whether it has attention."""
        return self.num_heads > 0

    @property
    def cached_per_token(self) -> int:
        """Numbers that the KV pool holds of each token."""
        if self.kv_layer is not None:
            return 0
        return self.num_kv_heads * (self.head_dim_k + (0 if self.has_latents else self.head_dim_v)) + self.index_dim

    @property
    def attention_params(self) -> AttentionParams:
        """The parameters of this layer's attention scores, as kernels take them."""
        return AttentionParams(self.scale, self.sliding_window or 0, self.softcap or 0.0)


Pool = TypeVar("Pool")


def kv_pools(geometry: Sequence[LayerGeometry], make: Callable[[LayerGeometry], Pool]) -> dict[int, Pool]:
    """The KV pool of each layer that attends: from `make`, or that of the layer whose keys and values it reads."""
    pools: dict[int, Pool] = {}
    for index, layer in enumerate(geometry):
        if layer.attends:
            pools[index] = make(layer) if layer.kv_layer is None else pools[layer.kv_layer]
    return pools


def keeps_states(geometry: Iterable[LayerGeometry]) -> bool:
    """Whether a layer keeps a state."""
    return any(layer.state is not None for layer in geometry)


def each_once(pools: Iterable[Pool]) -> Iterable[Pool]:
    """The different ones among `kv_pools`."""
    return {id(pool): pool for pool in pools}.values()


class Refusal(Exception):
    """Why a module cannot be served, as half a sentence for `gate.admit`."""


def probe_geometry(module: PreTrainedModel, first_position: int = 0) -> list[LayerGeometry]:
    """The geometry of every layer of a Hugging Face causal LM on the CPU, by one forward of six tokens.

    `first_position`: that of the first token; the others follow. Weights are not changed and their values do not
    matter. Raises `Refusal` unless each layer calls Hugging Face's attention interface once, with causal or
    sliding-window attention and no extra inputs; if some keep states, not every layer needs to attend.
    """
    calls: list[_Call] = []
    token = _calls.set(calls)
    try:
        with _attention_set_to(module, _PROBE_NAME), torch.no_grad(), recording_states() as state_calls:
            positions = {"position_ids": torch.arange(_NUM_TOKENS)[None] + first_position} if first_position else {}
            module(input_ids=torch.arange(1, 1 + _NUM_TOKENS)[None], use_cache=False, **positions)
    except Refusal:
        raise
    except Exception as problem:  # foreign modules may fail in any way
        raise Refusal(
            f"its forward does not work through the attention interface ({type(problem).__name__}: {problem})"
        ) from None
    finally:
        _calls.reset(token)
    return _by_layer(calls, state_calls, module.config.num_hidden_layers)


class _Call(NamedTuple):
    layer_idx: int | None
    geometry: LayerGeometry
    key: Tensor
    value: Tensor


class _Mask(msgspec.Struct, frozen=True):
    """Replaces a mask tensor: the kind of mask that the module asked for."""

    kind: str
    size: int

    def __getitem__(self, part: object) -> "_Mask":
        """The mask of some queries, which is of the same kind."""
        return self


_calls: ContextVar[list[_Call]] = ContextVar("calls")


def _by_layer(calls: list[_Call], state_calls: list[StateCall], num_layers: int) -> list[LayerGeometry]:
    try:
        states = states_by_layer(state_calls)
    except ValueError as problem:
        raise Refusal(str(problem)) from None
    if not calls and not states:
        raise Refusal("it never calls the attention interface")
    layers = [call.layer_idx for call in calls]
    all_layers = list(range(num_layers))
    if layers != ([index for index in all_layers if index in layers] if states else all_layers):
        raise Refusal(f"attention was called for layers {layers}, expected each of 0..{num_layers - 1} once, in order")
    if strangers := sorted(states.keys() - set(all_layers)):
        raise Refusal(f"layers {strangers} keep states, and it has layers 0..{num_layers - 1}")
    attention = {call.layer_idx: call.geometry for call in calls}
    return [
        msgspec.structs.replace(attention[index], state=states.get(index))
        if index in attention
        else LayerGeometry.without_attention(states.get(index))
        for index in all_layers
    ]


@contextmanager
def _attention_set_to(module: PreTrainedModel, name: str) -> Iterator[None]:
    before = module.config._attn_implementation
    module.config._attn_implementation = name
    try:
        yield
    finally:
        module.config._attn_implementation = before


def _probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    indices: object = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Replaces attention: q [1, H, T, Dk], k [1, Hk, T, Dk], v [1, Hk, T, Dv] -> zeros [1, T, H, Dv]."""
    window = sliding_window or None
    _check_call(module, attention_mask, window, is_causal, kwargs)
    calls, layer_idx = _calls.get(), getattr(module, "layer_idx", None)
    latents = products_of(module, key, value)
    index = _checked_index(indices, plain=not (window or softcap or s_aux is not None) and latents is not None)
    geometry = LayerGeometry(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim_k=key.shape[-1],
        head_dim_v=value.shape[-1],
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        sliding_window=window,
        softcap=float(softcap) if softcap else None,
        has_sinks=s_aux is not None,
        has_latents=latents is not None,
        kv_layer=next((call.layer_idx for call in calls if call.key is key and call.value is value), None),
        index_topk=0 if index is None else index.topk,
        index_dim=index.keys.shape[-1] if index is not None and index.layer == layer_idx else 0,
    )
    calls.append(_Call(layer_idx, geometry, key, value))
    size = value.shape[-1] if latents is None else latents.value_size
    return query.new_zeros(1, query.shape[2], query.shape[1], size), None


def _checked_index(indices: object, *, plain: bool) -> Index | None:
    """The index that attention was given; `plain`: it is over latents, without a window, a soft cap or sinks."""
    if indices is None:
        return None
    if not isinstance(indices, Index):
        raise Refusal("it gives attention indices of a kind that is not served")
    if not plain:
        raise Refusal("an indexer chooses positions for attention with a window, a soft cap, sinks or expanded keys")
    return indices


def _check_call(
    module: nn.Module, mask: object, window: int | None, is_causal: bool | None, kwargs: dict[str, Any]
) -> None:
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise Refusal("its attention is bidirectional")
    if not isinstance(mask, _Mask):
        raise Refusal("it makes an attention mask of its own")
    if mask.kind not in ("causal", "sliding"):
        raise Refusal(f"its attention mask is {mask.kind}; only causal and sliding-window attention are served")
    if mask.size != (window or 0):
        raise Refusal(f"its mask has window {mask.size or None}, but it tells attention {window}")
    strangers = sorted(
        name for name, given in kwargs.items() if isinstance(given, Tensor) and name not in HARMLESS_TENSORS
    )
    if strangers:
        raise Refusal(f"it passes tensors this engine does not know to attention: {', '.join(strangers)}")


def _probe_mask(*args: Any, mask_function: Callable[..., Any], local_size: int | None = None, **kwargs: Any) -> _Mask:
    """Replaces mask construction: tries `mask_function(batch, head, q, kv)` at indices that separate kinds of mask."""
    size = local_size or 0
    edges = {size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1} if size else set()
    queries = sorted({0, 1, 2, 3 * (size or 64), _FAR} | edges)
    reach = size or 9
    keys = {max(0, q + d) for q in queries for d in (-reach - 1, -reach, -reach + 1, -1, 0, 1)}
    reached = sorted(keys | {_FAR - (1 << bits) for bits in range(_FAR.bit_length())})
    q, k, zero = torch.tensor(queries)[:, None], torch.tensor(reached)[None], torch.tensor(0)
    got = torch.as_tensor(mask_function(zero, zero, q, k)).expand(len(queries), len(reached))
    if torch.equal(got, k <= q):
        return _Mask("causal", 0)
    if size and torch.equal(got, (k <= q) & (k > q - size)):
        return _Mask("sliding", size)
    if size and torch.equal(got, (k <= q) & (k // size == q // size)):
        return _Mask("chunked", size)
    return _Mask("of an unknown kind", size)


AttentionInterface.register(_PROBE_NAME, _probe_attention)
AttentionMaskInterface.register(_PROBE_NAME, _probe_mask)
