"""The parts of a Hugging Face module built as Llama is. Only such modules have layers that a fused decoder can run."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout_engine.model.modules import layer_patterns
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.layer_patterns import MixtureParts, QueryFactors
from rollout_engine.model.modules.positions import far_starts
from rollout_engine.model.packing.module_types import tensor_of

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_QKV = ("q_proj", "k_proj", "v_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_ROUTERS = {"gate", "router"}
_EXPERTS = "experts"


class UnsupportedStructure(Exception):
    """Why the layers of a module must run as modules."""


class MLP(NamedTuple):
    """down(activation(gate(x)) * up(x))."""

    module: nn.Module
    gate_up: list[nn.Module]
    down: nn.Module


class Mixture(NamedTuple):
    """A mixture of experts."""

    module: nn.Module
    router: nn.Module
    experts: nn.Module
    bias_name: str | None = None
    """The tensor of `module` that its router adds to scores; None: it gives the router none."""
    shared: MLP | None = None
    """Computes every token, in addition to its experts; None: nothing does."""
    shared_gate: nn.Module | None = None
    """A linear with one output, whose sigmoid multiplies the shared MLP's; None: nothing does."""


class DecoderLayer(NamedTuple):
    """One decoder layer; each part is a module of its own."""

    attention_norm: nn.Module
    qkv: list[nn.Module]
    head_norms: list[nn.Module]
    """RMSNorms of the heads of q and k; none if the architecture has none."""
    out: nn.Module
    mlp_norm: nn.Module
    mlp: MLP | Mixture
    geometry: LayerGeometry
    query_factors: QueryFactors | None


class DecoderStructure(NamedTuple):
    """A causal LM, or one with a head that classifies."""

    embedding: nn.Module
    rotary: nn.Module
    layers: list[DecoderLayer]
    norm: nn.Module
    head: nn.Module | None
    """The output head; None if a head classifies."""
    query_factors: QueryFactors | None
    """Multiplies the queries of every layer after their rotation; None: nothing does."""


def decoder_structure(module: PreTrainedModel, geometry: Sequence[LayerGeometry]) -> DecoderStructure:
    """The parts of `module`, whose weights are loaded. Raises `UnsupportedStructure` if it is not built as Llama is."""
    base = getattr(module, module.base_model_prefix)
    children = dict(base.named_children())
    require(children.keys() == {"embed_tokens", "layers", "norm", "rotary_emb"}, f"{_kind(base)} has other parts")
    layers = list(children["layers"])
    require(len(layers) == len(geometry), f"{len(geometry)} of its {len(layers)} layers have attention")
    head = module.get_output_embeddings()
    _require_pattern(layer_patterns.base_reason(base))
    if head is not None:
        _require_pattern(layer_patterns.head_reason(module))
    positions = _tried_positions(module)
    parts = [_layer(layer, one, positions) for layer, one in zip(layers, geometry, strict=True)]
    return DecoderStructure(
        embedding=children["embed_tokens"],
        rotary=children["rotary_emb"],
        layers=parts,
        norm=children["norm"],
        head=head,
        query_factors=_common_factors(parts, positions),
    )


def _tried_positions(module: PreTrainedModel) -> Tensor:
    """Positions int64 [T] on both sides of every boundary that the configuration may name."""
    starts = far_starts(module.config.get_text_config(), 2)
    return torch.tensor(sorted({0, 1, 2, *starts, *(start + 1 for start in starts)}))


def _common_factors(layers: Sequence[DecoderLayer], positions: Tensor) -> QueryFactors | None:
    """The factors of queries of all layers. Raises `UnsupportedStructure` if they differ."""
    found = [layer.query_factors for layer in layers]
    values = [torch.ones(len(positions)) if each is None else each.computed(positions, torch.float32) for each in found]
    require(all(torch.equal(each, values[0]) for each in values), "its layers scale queries differently")
    return found[0]


def require(condition: bool, otherwise: str) -> None:
    """Raise `UnsupportedStructure` with the reason `otherwise`, unless `condition` holds."""
    if not condition:
        raise UnsupportedStructure(otherwise)


def _require_pattern(reason: str | None) -> None:
    """Raise `UnsupportedStructure` with `reason`, the result of a trial in `layer_patterns`, unless it is None."""
    if reason is not None:
        raise UnsupportedStructure(reason)


def _layer(layer: nn.Module, geometry: LayerGeometry, positions: Tensor) -> DecoderLayer:
    children = dict(layer.named_children())
    require(children.keys() == _LAYER, f"{_kind(layer)} has other parts")
    attention, mlp = children["self_attn"], children["mlp"]
    inner = dict(attention.named_children())
    head_norms = [inner.pop(name) for name in ("q_norm", "k_norm") if name in inner]
    require(inner.keys() == {*_QKV, "o_proj"} and len(head_norms) != 1, f"{_kind(attention)} has other parts")
    require(not geometry.has_sinks, "its attention has sinks")
    is_mixture = _EXPERTS in dict(mlp.named_children())
    for child in (layer, attention, *([] if is_mixture else [mlp])):
        require(not list(child.parameters(recurse=False)), "its layers have parameters of their own")
        require(not list(child.buffers(recurse=False)), "its layers have buffers of their own")
    require(len({parameter.dtype for parameter in layer.parameters()}) == 1, "its weights have several dtypes")
    _check_linears(inner.values())
    pattern = layer_patterns.attention_pattern(attention, geometry, positions)
    _require_pattern(pattern.reason)
    _require_pattern(layer_patterns.layer_reason(layer))
    return DecoderLayer(
        attention_norm=children["input_layernorm"],
        qkv=[inner[name] for name in _QKV],
        head_norms=head_norms,
        out=inner["o_proj"],
        mlp_norm=children["post_attention_layernorm"],
        mlp=_mlp(mlp),
        geometry=geometry,
        query_factors=pattern.query_factors,
    )


def _mlp(mlp: nn.Module) -> MLP | Mixture:
    children = dict(mlp.named_children())
    if _EXPERTS in children:
        return _mixture(mlp, children)
    require(children.keys() >= set(_MLP), f"{_kind(mlp)} has other parts")
    _check_linears(children[name] for name in _MLP)
    return MLP(mlp, [children["gate_proj"], children["up_proj"]], children["down_proj"])


def _mixture(mixture: nn.Module, children: dict[str, nn.Module]) -> Mixture:
    names = _names_of(mixture, children)
    pattern = layer_patterns.mixture_pattern(mixture, names)
    _require_pattern(pattern.reason)
    for parameter in mixture.parameters():
        if parameter.dim() > 1:
            _check_values(parameter)
    shared = None if names.shared is None else _mlp(children[names.shared])
    assert not isinstance(shared, Mixture), "it has the parts of an MLP"
    gate = None if names.shared_gate is None else children[names.shared_gate]
    return Mixture(mixture, children[names.router], children[names.experts], pattern.bias_name, shared, gate)


def _names_of(mixture: nn.Module, children: dict[str, nn.Module]) -> MixtureParts:
    """Raises `UnsupportedStructure` if `mixture` has other parts."""
    routers = sorted(_ROUTERS & children.keys())
    others = {name: child for name, child in children.items() if name not in (*_ROUTERS, _EXPERTS)}
    shared = [name for name, child in others.items() if dict(child.named_children()).keys() >= set(_MLP)]
    gates = [name for name, child in others.items() if isinstance(child, nn.Linear) and child.out_features == 1]
    is_known = len(routers) == 1 and len(gates) <= len(shared) <= 1 and len(shared) + len(gates) == len(others)
    require(is_known, f"{_kind(mixture)} has other parts")
    return MixtureParts(routers[0], _EXPERTS, next(iter(shared), None), next(iter(gates), None))


def _check_linears(linears: Iterable[nn.Module]) -> None:
    for child in linears:
        require(isinstance(child, nn.Linear), "its projections are not linear layers")
        _check_values(tensor_of(child))


def _check_values(weight: Tensor) -> None:
    # Both ways to compute a product with zeros agree, so a trial would prove nothing.
    require(bool(weight[0].any()), "its weights are zeros")


def _kind(module: nn.Module) -> str:
    return type(module).__name__
