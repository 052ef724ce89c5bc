"""The parts of a Hugging Face module built as Llama is. Only such modules have layers that a fused decoder can run."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout_engine.model.modules import layer_patterns
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.layer_patterns import QueryFactors
from rollout_engine.model.modules.positions import far_starts
from rollout_engine.model.packing.module_types import tensor_of

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_QKV = ("q_proj", "k_proj", "v_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_MIXTURE = {"gate", "experts"}


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
    for child in (layer, attention, mlp):
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
    if children.keys() == _MIXTURE:
        for parameter in mlp.parameters():
            _check_values(parameter)
        return Mixture(mlp, children["gate"], children["experts"])
    require(children.keys() >= set(_MLP), f"{_kind(mlp)} has other parts")
    _check_linears(children[name] for name in _MLP)
    return MLP(mlp, [children["gate_proj"], children["up_proj"]], children["down_proj"])


def _check_linears(linears: Iterable[nn.Module]) -> None:
    for child in linears:
        require(isinstance(child, nn.Linear), "its projections are not linear layers")
        _check_values(tensor_of(child))


def _check_values(weight: Tensor) -> None:
    # Both ways to compute a product with zeros agree, so a trial would prove nothing.
    require(bool(weight[0].any()), "its weights are zeros")


def _kind(module: nn.Module) -> str:
    return type(module).__name__
