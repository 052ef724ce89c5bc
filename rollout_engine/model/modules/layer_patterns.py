"""Recognises attention whose forward computes the same as Llama's, by trial.

    a forward may depend on                 the trial sees anything else, because
    its parts, in Llama's formula           known functions replace parts, and inputs are small and large
    positions, by rotary embeddings alone   positions are a tensor that allows no operation
    attributes and fields of known names    forwards read them through a proxy that records names

A length, limit or switch that a few tokens do not reach is not missed: a forward that reads one is not recognised.
"""

from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from rollout_engine.model.modules.forward_trial import (
    ATTENTION_NAME,
    NUM_TOKENS,
    READS_POSITIONS,
    SCALES,
    Forward,
    layer_inputs,
    require,
    require_same,
    unmatched_reason,
    waves,
)
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.part_names import names_by_role

_LEAST_ROWS = 1024
"""Positions in a table of factors at first, and of those that are computed at once."""
_NORMS = {"q_norm": 1.5, "k_norm": 0.75}
"""Factors that replace norms of heads."""


class AttentionPattern(NamedTuple):
    """How an attention module computes."""

    reason: str | None
    """Why it does not only rotate q and k, attend by its geometry, and project; None if it does so."""
    query_factors: "QueryFactors | None" = None
    """Multiplies its queries after the rotation, by their positions, as in Ministral 3; None: nothing does."""
    is_gated: bool = False
    """Whether each head of `q_proj` is followed by a gate, whose sigmoid multiplies the output of the head."""


class AttentionForm(NamedTuple):
    """How attention may differ from Llama's."""

    rotary: int | None = None
    """The first channels of a head, which are rotated, or 0; None: all."""
    is_gated: bool = False
    """Whether a gate follows each head of the queries (`AttentionPattern.is_gated`)."""
    norms_whole: bool = False
    """Whether norms of q and k are over all heads together."""


def attention_pattern(
    attention: nn.Module,
    geometry: LayerGeometry,
    positions: Tensor,
    rotary: int | None = None,
    *,
    norms_whole: bool = False,
) -> AttentionPattern:
    """The pattern of `attention`. `positions` int64 [T]: those at which factors of queries are tried.

    `rotary`: the first channels of a head, which are to be rotated, or 0; None: all. `norms_whole`: norms of q and k
    are to be over all heads together.
    """
    queries = getattr(dict(attention.named_children()).get("q_proj"), "out_features", 0)
    form = AttentionForm(rotary, queries == 2 * geometry.num_heads * geometry.head_dim_k, norms_whole)
    reason = unmatched_reason("attention", attention, lambda trial: _attend(trial, geometry, form))
    if reason is None or READS_POSITIONS not in reason or form != AttentionForm():
        return AttentionPattern(reason, None, form.is_gated)
    factors = QueryFactors(attention, geometry.head_dim_k)
    other = unmatched_reason(
        "scaled attention", attention, lambda trial: _attend(trial, geometry, form, positions, factors)
    )
    return AttentionPattern(reason) if other is not None else AttentionPattern(None, factors)


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
    out = waves(1, query.shape[2], query.shape[1], value.shape[3], phase=0.4)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    found = _Attended(query, key, value, out, scale, sliding_window or 0, softcap or 0.0, others)
    _attended.get().append(found)
    return out, None


AttentionInterface.register(ATTENTION_NAME, _record)


def _attend(
    forward: Forward,
    geometry: LayerGeometry,
    form: AttentionForm,
    positions: Tensor | None = None,
    factors: "QueryFactors | None" = None,
) -> None:
    """`positions` int64 [T]: those that the forward may read, for `factors` of its queries; None: it may read none."""
    count = NUM_TOKENS if positions is None else len(positions)
    rotary = geometry.head_dim_k if form.rotary is None else form.rotary
    rotations = (waves(1, count, rotary, phase=0.1), waves(1, count, rotary, phase=0.2)) if rotary else None
    names = names_by_role(forward.children) or {}
    require(names.keys() >= {"q", "k", "v", "out"}, "has other parts")
    hidden = waves(1, count, 7, phase=0.8)
    by_token = None if factors is None or positions is None else _checked_factors(factors, positions)
    for scale in SCALES:
        flat = _projections(geometry, count, scale)
        gates = waves(*flat["q_proj"].shape, phase=0.7) * scale if form.is_gated else None
        projected = waves(1, count, 5, phase=0.5)
        inputs: list[Tensor] = []

        def project(x: Tensor, inputs: list[Tensor] = inputs, projected: Tensor = projected) -> Tensor:
            inputs.append(x)
            return projected

        results = flat if gates is None else flat | {"q_proj": _interleaved(flat["q_proj"], gates, geometry.num_heads)}
        parts: dict[str, object] = {name: partial(_projected, hidden, value) for name, value in results.items()} | {
            names["out"]: project
        }
        if "q_norm" in names:
            counts = (
                dict(zip(_NORMS, _counts(geometry), strict=False)) if form.norms_whole else dict.fromkeys(_NORMS, 1)
            )
            parts |= {
                names[role]: partial(_norm, counts[role] * geometry.head_dim_k, factor)
                for role, factor in _NORMS.items()
            }
        result, call = _called(forward, parts, hidden, rotations, positions)
        require(len(inputs) == 1 and result[0] is projected, "projects otherwise")
        wanted = call.out.flatten(2) if gates is None else call.out.flatten(2) * torch.sigmoid(gates)
        require_same(inputs[0], wanted, "changes the result of attention")
        q, k, v = (x.unflatten(2, (heads, -1)) for x, heads in zip(flat.values(), _counts(geometry), strict=True))
        if "q_norm" in names:
            q, k = q * _NORMS["q_norm"], k * _NORMS["k_norm"]
        if rotations is not None:
            q, k = _rotated(q, *rotations), _rotated(k, *rotations)
        if by_token is not None:
            q = q * by_token[None, :, None, None]
        _check_call(call, geometry, q, k, v)


def _interleaved(heads: Tensor, gates: Tensor, num_heads: int) -> Tensor:
    """Each head of [1, T, H * D], and its gate behind it, [1, T, H * 2 D]."""
    pair = torch.stack([x.unflatten(2, (num_heads, -1)) for x in (heads, gates)], 3)
    return pair.flatten(2)


def _checked_factors(factors: "QueryFactors", positions: Tensor) -> Tensor:
    """The factors float32 [T] of `positions`, which have to be the same in any batch."""
    found = factors.computed(positions, torch.float32)
    alone = torch.cat([factors.computed(each[None], torch.float32) for each in positions])
    require_same(found, alone, "has factors that depend on the batch")
    return found


def _called(
    forward: Forward, parts: dict[str, object], hidden: Tensor, rotations: object, positions: Tensor | None
) -> tuple[Any, _Attended]:
    """The result of an attention's forward, and its one call of attention."""
    calls: list[_Attended] = []
    token = _attended.set(calls)
    try:
        result = forward(parts, hidden, **layer_inputs(rotations, positions))
    finally:
        _attended.reset(token)
    require(len(calls) == 1, f"calls attention {len(calls)} times")
    return result, calls[0]


class QueryFactors:
    """Factors of queries by their positions, which `attention` itself computes, once for each position.

    Queries of ones that are not rotated show them.
    """

    def __init__(self, attention: nn.Module, head_dim: int) -> None:
        self._forward, self._head_dim = Forward(attention), head_dim
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
        names = names_by_role(self._forward.children) or {}
        parts |= {name: lambda x: x for role, name in names.items() if role in ("q_norm", "k_norm", "out")}
        _, call = _called(self._forward, parts, ones, (ones, zeros), positions)
        return call.q[0, 0, :, 0].contiguous()


def _counts(geometry: LayerGeometry) -> tuple[int, int, int]:
    """Heads of q, k and v."""
    return geometry.num_heads, geometry.num_kv_heads, geometry.num_kv_heads


def _projections(geometry: LayerGeometry, count: int, scale: float) -> dict[str, Tensor]:
    """Results [1, T, heads * size] of q_proj, k_proj and v_proj."""
    sizes = geometry.head_dim_k, geometry.head_dim_k, geometry.head_dim_v
    rows = zip(("q_proj", "k_proj", "v_proj"), _counts(geometry), sizes, (0.3, 0.6, 0.9), strict=True)
    return {name: waves(1, count, heads * size, phase=phase) * scale for name, heads, size, phase in rows}


def _check_call(call: _Attended, geometry: LayerGeometry, q: Tensor, k: Tensor, v: Tensor) -> None:
    """`q`, `k`, `v` [1, T, H, D]: those that attention should have been given."""
    require_same(call.q, q.transpose(1, 2), "computes queries otherwise")
    require_same(call.k, k.transpose(1, 2), "computes keys otherwise")
    require_same(call.v, v.transpose(1, 2), "computes values otherwise")
    params = (call.scale, call.sliding_window, call.softcap)
    require(params == tuple(geometry.attention_params), "attends with other parameters")
    strangers = [name for name, value in call.others.items() if isinstance(value, Tensor) and name != "position_ids"]
    require(not strangers, f"passes {', '.join(strangers)} to attention")


def _projected(given: Tensor, result: Tensor, x: Tensor) -> Tensor:
    """Replaces the projection of the layer's input `given` to `result`."""
    require_same(x, given, "projects another input than its own")
    return result.clone()


def _norm(size: int, factor: float, x: Tensor) -> Tensor:
    """Replaces the norm of each head [..., D] of q or k."""
    require(x.shape[-1] == size, "norms queries or keys over more than one head")
    return x * factor


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [1, T, H, D], whose first R channels are rotated by cos, sin [1, T, R]."""
    x, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = x.chunk(2, dim=-1)
    turned = x * cos[:, :, None] + torch.cat([-second, first], dim=-1) * sin[:, :, None]
    return torch.cat([turned, rest], dim=-1)
