"""Recognises attention, layers, bases and heads whose forwards compute what Llama's do, by trial.

    a forward may depend on                 the trial sees anything else, because
    its parts, in Llama's formula           known functions replace parts, and inputs are small and large
    positions, by rotary embeddings alone   positions are a tensor that allows no operation
    attributes and fields of known names    forwards read them through a proxy that records names

A length, limit or switch that a few tokens do not reach is not missed: a forward that reads one is not recognised.
"""

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_outputs import MoeModelOutputWithPast

from rollout_engine.model.modules.geometry import LayerGeometry

_ATTENTION_NAME = "rollout_engine_pattern"
_NUM_TOKENS = 3
_LEAST_ROWS = 1024
"""Positions in a table of factors at first, and of those that are computed at once."""
_SCALES = (1e-3, 1.0, 1e4)
"""Sizes of inputs: a clamp, or a cap by tanh, changes the large ones."""
_NORMS = {"q_norm": 1.5, "k_norm": 0.75}
"""Factors that replace norms of heads."""
_ANYWHERE = {"config", "layer_idx", "training", "hidden_size"}
_READS_POSITIONS = "computes with positions"
_ATTENTION = (
    _ANYWHERE
    | {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "head_dim", "scaling", "sliding_window", "use_rope"}
    | {"num_heads", "num_attention_heads", "num_key_value_heads", "num_key_value_groups", "is_causal"}
    | {"attention_dropout", "residual_dropout", "layer_type", "attention_type"}
    | {"config._attn_implementation", "config.sliding_window"}
)
_KNOWN = {
    "attention": _ATTENTION,
    "scaled attention": _ATTENTION | {"config.rope_parameters"},
    "layer": _ANYWHERE
    | {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp", "residual_multiplier", "residual_dropout"}
    | {"layer_type", "attention_type", "gradient_checkpointing"},
    "base": _ANYWHERE
    | {"embed_tokens", "layers", "norm", "rotary_emb", "gradient_checkpointing", "has_sliding_layers"}
    | {"embedding_multiplier"}
    | {"config._attn_implementation", "config.is_causal", "config.layer_types", "config.num_hidden_layers"}
    | {"config.sliding_window"},
    "head": _ANYWHERE
    | {"model", "lm_head", "vocab_size", "num_experts", "num_experts_per_tok", "router_aux_loss_coef"}
    | {"config.output_router_logits", "config.logits_scaling"},
}
"""Names that a forward may read: its parts, sizes, and numbers that act on every token alike."""


class AttentionPattern(NamedTuple):
    """How an attention module computes."""

    reason: str | None
    """Why it does not only rotate q and k, attend as its geometry says, and project; None where it does so."""
    query_factors: "QueryFactors | None" = None
    """Multiplies its queries after the rotation, by their positions, as in Ministral 3; None: nothing does."""


def attention_pattern(attention: nn.Module, geometry: LayerGeometry, positions: Tensor) -> AttentionPattern:
    """The pattern of `attention`. `positions` int64 [T]: those at which factors of queries are tried."""
    reason = _reason("attention", attention, lambda trial: _attend(trial, geometry))
    if reason is None or _READS_POSITIONS not in reason:
        return AttentionPattern(reason)
    factors = QueryFactors(attention, geometry.head_dim_k)
    other = _reason("scaled attention", attention, lambda trial: _attend(trial, geometry, positions, factors))
    return AttentionPattern(reason) if other is not None else AttentionPattern(None, factors)


def layer_reason(layer: nn.Module) -> str | None:
    """Why `layer` is not x + attention(norm(x)), then x + mlp(norm(x)); None where it is."""
    return _reason("layer", layer, _run_layer)


def base_reason(base: nn.Module) -> str | None:
    """Why `base` does not only embed tokens, rotate by their positions, run its layers and norm; None where it does."""
    return _reason("base", base, _run_base)


def head_reason(model: nn.Module) -> str | None:
    """Why a causal LM's logits are not its head's products of what its base returns; None where they are."""
    return _reason("head", model, _run_head)


class _Trial:
    """A module in whose place forwards read: `parts` replace its own, names that are read are recorded."""

    def __init__(self, target: Any, parts: dict[str, object], prefix: str = "", reads: set[str] | None = None) -> None:
        self.__dict__.update(_target=target, _parts=parts, _prefix=prefix, _reads=set() if reads is None else reads)

    @property
    def __class__(self) -> Any:  # for `super()`
        return type(self._target)

    def __getattr__(self, name: str) -> Any:
        self._reads.add(self._prefix + name)
        if name in self._parts:
            return self._parts[name]
        value = getattr(self._target, name)
        is_config = name == "config" and not self._prefix
        return _Trial(value, {"_attn_implementation": _ATTENTION_NAME}, "config.", self._reads) if is_config else value


class _Mismatch(Exception):
    """A forward does something that Llama's does not, as the end of a sentence that begins with its class."""


def _reason(kind: str, module: nn.Module, run: Callable[["_Forward"], None]) -> str | None:
    name = type(module).__name__
    if "forward" in vars(module):
        return f"the forward of {name} was replaced"
    trial = _Forward(module)
    try:
        with torch.no_grad():
            run(trial)
    except _Mismatch as problem:
        return f"{name} {problem}"
    except Exception as problem:  # foreign modules may fail in any way
        return f"{name} does not run as Llama's does ({type(problem).__name__}: {problem})"
    if strangers := sorted(trial.reads - _KNOWN[kind]):
        return f"{name} reads {', '.join(strangers)}, which its pattern does not allow"
    return None


class _Forward:
    """Calls the forward of `module` over other parts."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._function = inspect.unwrap(type(module).forward)
        self.reads: set[str] = set()
        self.children = dict(module.named_children())

    def __call__(self, parts: dict[str, object], *args: Any, **kwargs: Any) -> Any:
        return self._function(_Trial(self._module, parts, reads=self.reads), *args, **kwargs)


class _WatchedPositions(Tensor):
    """Positions; an operation on them is a `_Mismatch`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # a shape, a device
            return super().__torch_function__(func, types, args, kwargs or {})
        raise _Mismatch(f"{_READS_POSITIONS} ({getattr(func, '__name__', func)})")


def _positions() -> Tensor:
    return torch.arange(_NUM_TOKENS)[None].as_subclass(_WatchedPositions)


def _waves(*shape: int, phase: float) -> Tensor:
    """Fixed irregular numbers; nothing is drawn from torch's generator."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 0.7 + phase).square().sin().view(shape)


class _Attended(NamedTuple):
    """Arguments of one call of attention, and its result."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    scale: float
    sliding_window: int
    softcap: float
    others: dict[str, Any]


_attended: ContextVar[list[_Attended]] = ContextVar("attended")


def _record(
    module: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Replaces attention; the result [1, T, H, Dv] is fixed."""
    out = _waves(1, query.shape[2], query.shape[1], value.shape[3], phase=0.4)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    found = _Attended(query, key, value, out, scale, sliding_window or 0, softcap or 0.0, others)
    _attended.get().append(found)
    return out, None


AttentionInterface.register(_ATTENTION_NAME, _record)


def _attend(
    forward: _Forward,
    geometry: LayerGeometry,
    positions: Tensor | None = None,
    factors: "QueryFactors | None" = None,
) -> None:
    """`positions` int64 [T]: those that the forward may read, for `factors` of its queries; None: it may read none."""
    count = _NUM_TOKENS if positions is None else len(positions)
    cos, sin = (_waves(1, count, geometry.head_dim_k, phase=phase) for phase in (0.1, 0.2))
    hidden = _waves(1, count, 7, phase=0.8)
    by_token = None if factors is None or positions is None else _checked_factors(factors, positions)
    for scale in _SCALES:
        flat = _projections(geometry, count, scale)
        projected, inputs = _waves(1, count, 5, phase=0.5), []

        def project(x: Tensor, inputs: list[Tensor] = inputs, projected: Tensor = projected) -> Tensor:
            inputs.append(x)
            return projected

        parts = {name: partial(_projected, hidden, value) for name, value in flat.items()} | {"o_proj": project}
        if "q_norm" in forward.children:
            parts |= {name: partial(_norm, geometry.head_dim_k, factor) for name, factor in _NORMS.items()}
        result, call = _called(forward, parts, hidden, (cos, sin), positions)
        _require(len(inputs) == 1 and result[0] is projected, "projects otherwise")
        _require_same(inputs[0], call.out.flatten(2), "changes the result of attention")
        q, k, v = (x.unflatten(2, (heads, -1)) for x, heads in zip(flat.values(), _counts(geometry), strict=True))
        if "q_norm" in forward.children:
            q, k = q * _NORMS["q_norm"], k * _NORMS["k_norm"]
        q = _rotated(q, cos, sin)
        if by_token is not None:
            q = q * by_token[None, :, None, None]
        _check_call(call, geometry, q, _rotated(k, cos, sin), v)


def _checked_factors(factors: "QueryFactors", positions: Tensor) -> Tensor:
    """The factors float32 [T] of `positions`, which have to be the same in any batch."""
    found = factors.computed(positions, torch.float32)
    alone = torch.cat([factors.computed(each[None], torch.float32) for each in positions])
    _require_same(found, alone, "has factors that depend on the batch")
    return found


def _called(
    forward: _Forward, parts: dict[str, object], hidden: Tensor, rotations: object, positions: Tensor | None
) -> tuple[Any, _Attended]:
    """The result of an attention's forward, and its one call of attention."""
    calls: list[_Attended] = []
    token = _attended.set(calls)
    try:
        result = forward(parts, hidden, **_layer_inputs(rotations, positions))
    finally:
        _attended.reset(token)
    _require(len(calls) == 1, f"calls attention {len(calls)} times")
    return result, calls[0]


class QueryFactors:
    """Factors of queries by their positions, which `attention` itself computes, once for each position.

    Queries of ones that are not rotated show them.
    """

    def __init__(self, attention: nn.Module, head_dim: int) -> None:
        self._forward, self._head_dim = _Forward(attention), head_dim
        self._table = torch.empty(0)

    def rows(self, positions: Tensor, like: Tensor) -> Tensor:
        """Factors [T] of positions int64 [T], in the dtype and on the device of `like`."""
        end = int(positions.max()) + 1 if len(positions) else 0
        return self.table(end, like).index_select(0, positions)

    def table(self, end: int, like: Tensor) -> Tensor:
        """Factors [P] of positions 0 to P - 1, P >= `end`."""
        if len(self._table) < end or self._table.dtype != like.dtype or self._table.device != like.device:
            size = max(_LEAST_ROWS, 1 << (end - 1).bit_length())
            pieces = torch.arange(size, device=like.device).split(_LEAST_ROWS)
            self._table = torch.cat([self.computed(each, like.dtype) for each in pieces])
        return self._table

    @torch.no_grad()
    def computed(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Factors [T] of positions int64 [T]."""
        shape = 1, len(positions), self._head_dim
        ones, zeros = (torch.full(shape, value, dtype=dtype, device=positions.device) for value in (1.0, 0.0))
        parts: dict[str, object] = dict.fromkeys(("q_proj", "k_proj", "v_proj"), lambda _: ones.clone())
        parts |= dict.fromkeys(("q_norm", "k_norm", "o_proj"), lambda x: x)
        _, call = _called(self._forward, parts, ones, (ones, zeros), positions)
        return call.q[0, 0, :, 0].contiguous()


def _counts(geometry: LayerGeometry) -> tuple[int, int, int]:
    """Heads of q, k and v."""
    return geometry.num_heads, geometry.num_kv_heads, geometry.num_kv_heads


def _projections(geometry: LayerGeometry, count: int, scale: float) -> dict[str, Tensor]:
    """Results [1, T, heads * size] of q_proj, k_proj and v_proj."""
    sizes = geometry.head_dim_k, geometry.head_dim_k, geometry.head_dim_v
    rows = zip(("q_proj", "k_proj", "v_proj"), _counts(geometry), sizes, (0.3, 0.6, 0.9), strict=True)
    return {name: _waves(1, count, heads * size, phase=phase) * scale for name, heads, size, phase in rows}


def _check_call(call: _Attended, geometry: LayerGeometry, q: Tensor, k: Tensor, v: Tensor) -> None:
    """`q`, `k`, `v` [1, T, H, D]: those that attention should have been given."""
    _require_same(call.q, q.transpose(1, 2), "computes queries otherwise")
    _require_same(call.k, k.transpose(1, 2), "computes keys otherwise")
    _require_same(call.v, v.transpose(1, 2), "computes values otherwise")
    params = (call.scale, call.sliding_window, call.softcap)
    _require(params == tuple(geometry.attention_params), "attends with other parameters")
    strangers = [name for name, value in call.others.items() if isinstance(value, Tensor) and name != "position_ids"]
    _require(not strangers, f"passes {', '.join(strangers)} to attention")


def _projected(given: Tensor, result: Tensor, x: Tensor) -> Tensor:
    """Replaces the projection of the layer's input `given` to `result`."""
    _require_same(x, given, "projects another input than its own")
    return result.clone()


def _norm(size: int, factor: float, x: Tensor) -> Tensor:
    """Replaces the norm of each head [..., D] of q or k."""
    _require(x.shape[-1] == size, "norms queries or keys over more than one head")
    return x * factor


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [1, T, H, D] rotated by cos, sin [1, T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, :, None] + torch.cat([-second, first], dim=-1) * sin[:, :, None]


def _layer_inputs(rotations: object, positions: Tensor | None = None) -> dict[str, object]:
    """Arguments of a layer's forward; `positions` int64 [T] that it may read; None: it may read none."""
    return {
        "position_embeddings": rotations,
        "attention_mask": None,
        "position_ids": _positions() if positions is None else positions[None],
        "past_key_values": None,
        "use_cache": False,
    }


def _run_layer(forward: _Forward) -> None:
    rotations, seen = object(), []

    def attend(hidden_states: Tensor, position_embeddings: object = None, **kwargs: Any) -> tuple[Tensor, None]:
        seen.append(position_embeddings)
        return hidden_states.roll(1, dims=1) * 0.5, None

    parts: dict[str, object] = {
        "input_layernorm": lambda x: x.flip(2) * 1.25,
        "self_attn": attend,
        "post_attention_layernorm": lambda x: x.roll(1, dims=2) * 0.75,
        "mlp": lambda x: x.flip(1) * 1.5,
    }
    for scale in _SCALES:
        x = _waves(1, _NUM_TOKENS, 8, phase=0.3) * scale
        result = forward(parts, x, **_layer_inputs(rotations))
        middle = x + x.flip(2).mul(1.25).roll(1, dims=1) * 0.5
        wanted = middle + middle.roll(1, dims=2).mul(0.75).flip(1) * 1.5
        _require_same(result[0] if isinstance(result, tuple) else result, wanted, "adds its parts otherwise")
    _require(all(each is rotations for each in seen), "changes rotary embeddings")


def _run_base(forward: _Forward) -> None:
    rotations, count = (torch.zeros(1), torch.zeros(1)), len(list(forward.children["layers"]))
    ids, positions = torch.arange(_NUM_TOKENS)[None], _positions()
    for scale in _SCALES:
        embedded, seen = _waves(1, _NUM_TOKENS, 8, phase=0.3) * scale, []

        def embed(tokens: Tensor, embedded: Tensor = embedded) -> Tensor:
            return embedded

        def rotate(x: Tensor, position_ids: Tensor) -> object:
            _require(position_ids is positions, "rotates by other positions")
            return rotations

        def layer(x: Tensor, position_embeddings: object = None, seen: list[object] = seen, **kwargs: Any) -> Tensor:
            seen.append(position_embeddings)
            return x.roll(1, dims=2) * 0.9

        parts = {"embed_tokens": embed, "rotary_emb": rotate, "layers": [layer] * count, "norm": lambda x: x.flip(1)}
        output = forward(parts, input_ids=ids, position_ids=positions, use_cache=False)
        wanted = embedded
        for _ in range(count):
            wanted = wanted.roll(1, dims=2) * 0.9
        _require_same(output.last_hidden_state, wanted.flip(1), "does more than embed, run its layers and norm")
        _require(seen == [rotations] * count, "changes rotary embeddings")


def _run_head(forward: _Forward) -> None:
    rows = torch.tensor([2, 0])
    names = forward.children.keys() - {"lm_head"}
    for scale in _SCALES:
        states = _waves(1, _NUM_TOKENS, 8, phase=0.3) * scale
        base = MoeModelOutputWithPast(last_hidden_state=states)
        parts: dict[str, object] = {name: lambda base=base, **kwargs: base for name in names}
        parts |= {"lm_head": lambda x: x.flip(2) * 0.7}
        output = forward(parts, input_ids=rows[None], use_cache=False, logits_to_keep=rows)
        _require_same(output.logits, states[:, rows].flip(2) * 0.7, "changes its logits")


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise _Mismatch(otherwise)


def _require_same(found: Tensor, wanted: Tensor, otherwise: str) -> None:
    _require(found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-5, atol=1e-6), otherwise)
