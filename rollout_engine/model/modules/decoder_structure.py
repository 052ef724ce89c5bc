"""The parts of a Hugging Face module built as Llama is. Only such modules have layers that a fused decoder can run.

Some decoders also run layers with the gated delta rule in place of attention, gates of attention and partial rotations.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout_engine.model.modules import layer_patterns
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.layer_patterns import MIXER, QueryFactors
from rollout_engine.model.modules.mixer_patterns import DeltaPattern, delta_pattern
from rollout_engine.model.modules.mixture_patterns import MixtureParts, mixture_pattern
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


class DeltaNet(NamedTuple):
    """A mixer with the gated delta rule."""

    module: nn.Module
    """Has the parameters A_log and dt_bias."""
    convolution: nn.Module
    norm: nn.Module
    pattern: DeltaPattern


class DecoderLayer(NamedTuple):
    """One decoder layer; each part is a module of its own."""

    attention_norm: nn.Module
    qkv: list[nn.Module]
    """The projections of attention; with `delta` all linears of the layer's input."""
    head_norms: list[nn.Module]
    """RMSNorms of the heads of q and k; none if the architecture has none."""
    out: nn.Module
    mlp_norm: nn.Module
    mlp: MLP | Mixture
    geometry: LayerGeometry
    query_factors: QueryFactors | None
    is_gated: bool = False
    """Whether attention has gates, as `AttentionPattern.is_gated`."""
    delta: DeltaNet | None = None
    """Stands in place of attention; None: the layer attends."""


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
    rotary_size: int
    """The first channels of a head, which are rotated."""


def decoder_structure(
    module: PreTrainedModel, geometry: Sequence[LayerGeometry], *, takes_mixers: bool = False
) -> DecoderStructure:
    """The parts of `module`, whose weights are loaded. Raises `UnsupportedStructure` if it is not built as Llama is.

    `takes_mixers`: layers may have the gated delta rule, and attention gates and partial rotations.
    """
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
    dims = {one.head_dim_k for one in geometry if one.attends}
    require(len(dims) == 1, "its layers do not attend, or with heads of several sizes")
    rotary_size = _rotary_size(children["rotary_emb"], tensor_of(children["norm"]))
    attention = _AttentionForm(positions, rotary_size, takes_mixers)
    require(takes_mixers or {rotary_size} == dims, "its rotations are of some channels")
    parts = [_layer(layer, one, attention) for layer, one in zip(layers, geometry, strict=True)]
    return DecoderStructure(
        embedding=children["embed_tokens"],
        rotary=children["rotary_emb"],
        layers=parts,
        norm=children["norm"],
        head=head,
        query_factors=_common_factors([part for part in parts if part.delta is None], positions),
        rotary_size=rotary_size,
    )


def _rotary_size(rotary: nn.Module, like: Tensor) -> int:
    """Channels of a head that `rotary` rotates."""
    positions = torch.zeros(1, 1, dtype=torch.int64, device=like.device)
    try:
        with torch.no_grad():
            cos, _ = rotary(like[None, None], position_ids=positions)
    except Exception as problem:  # foreign modules may fail in any way
        raise UnsupportedStructure(f"{_kind(rotary)} does not run as Llama's does ({problem})") from None
    return int(cos.shape[-1])


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


class _AttentionForm(NamedTuple):
    """The extent to which layers may differ from Llama's."""

    positions: Tensor
    """int64 [T]: those at which factors of queries are tried."""
    rotary_size: int
    takes_mixers: bool


def _layer(layer: nn.Module, geometry: LayerGeometry, form: _AttentionForm) -> DecoderLayer:
    children = dict(layer.named_children())
    if MIXER in children:
        return _layer_with_mixer(layer, children, geometry, form)
    require(geometry.attends, f"{_kind(layer)} does not attend")
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
    is_partial = form.rotary_size != geometry.head_dim_k
    sizes = (form.rotary_size,) if is_partial else ()
    pattern = layer_patterns.attention_pattern(attention, geometry, form.positions, *sizes)
    _require_pattern(pattern.reason)
    require(form.takes_mixers or not pattern.is_gated, "its attention has gates")
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
        is_gated=pattern.is_gated,
    )


def _layer_with_mixer(
    layer: nn.Module, children: dict[str, nn.Module], geometry: LayerGeometry, form: _AttentionForm
) -> DecoderLayer:
    mixer, mlp = children[MIXER], children["mlp"]
    require(form.takes_mixers and geometry.state is not None, "some of its layers keep states")
    require(children.keys() == {*_LAYER, MIXER} - {"self_attn"}, f"{_kind(layer)} has other parts")
    is_mixture = _EXPERTS in dict(mlp.named_children())
    for child in (layer, *([] if is_mixture else [mlp])):
        require(
            not [*child.parameters(recurse=False), *child.buffers(recurse=False)], "its layers have their own tensors"
        )
    assert geometry.state is not None, "it keeps one"
    pattern = delta_pattern(mixer, geometry.state)
    _require_pattern(pattern.reason)
    _require_pattern(layer_patterns.layer_reason(layer))
    inner = dict(mixer.named_children())
    own = [*mixer.parameters(recurse=False), *inner["norm"].parameters()]  # read as float32, whatever they are
    others = {parameter.dtype for parameter in layer.parameters() if not any(parameter is each for each in own)}
    require(len(others) == 1, "its weights have several dtypes")
    inputs = [inner[name] for name in pattern.inputs]
    _check_linears([*inputs, inner["out_proj"]])
    return DecoderLayer(
        attention_norm=children["input_layernorm"],
        qkv=inputs,
        head_norms=[],
        out=inner["out_proj"],
        mlp_norm=children["post_attention_layernorm"],
        mlp=_mlp(mlp),
        geometry=geometry,
        query_factors=None,
        delta=DeltaNet(mixer, inner["conv1d"], inner["norm"], pattern),
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
    pattern = mixture_pattern(mixture, names)
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
