"""The parts of a Hugging Face module built as Llama is. Only such modules have layers that a fused decoder can run.

Some decoders also run layers with a mixer in place of attention, gates of attention, partial rotations or none, norms
of results, numbers by which Granite multiplies residuals and embeddings and divides logits, and layers with attention
or an MLP alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout_engine.model.modules import block_patterns, layer_patterns
from rollout_engine.model.modules.feed_forwards import MLP, Mixture, feed_forward, mlp_structure
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.layer_patterns import QueryFactors
from rollout_engine.model.modules.mamba_patterns import MambaPattern, mamba_pattern
from rollout_engine.model.modules.mixer_patterns import DeltaPattern, delta_pattern
from rollout_engine.model.modules.part_names import names_by_role
from rollout_engine.model.modules.passed_layers import AbsentHead, PassedLayer
from rollout_engine.model.modules.positions import far_starts
from rollout_engine.model.modules.short_convolution_patterns import ConvolutionPattern, convolution_pattern
from rollout_engine.model.modules.structure_checks import (
    UnsupportedStructure,
    check_linears,
    kind_of,
    require,
    require_no_tensors,
    require_pattern,
)
from rollout_engine.model.packing.module_types import tensor_of

_BASE = {"embedding", "layers", "norm"}
_FEED_FORWARDS = ({"mlp"}, {"mixture"}, {"shared_mlp"}, {"mixture", "shared_mlp"})
"""Roles of the parts that follow a layer's second norm."""


class Mixer(NamedTuple):
    """A mixer in place of attention: the gated delta rule, Mamba 2's recurrence or a short convolution."""

    module: nn.Module
    """Has the vectors of one element a head, if there are some."""
    convolution: nn.Module
    norm: nn.Module | None
    """Behind a recurrence."""
    pattern: DeltaPattern | MambaPattern | ConvolutionPattern


class DecoderLayer(NamedTuple):
    """One decoder layer; each part is a module of its own."""

    attention_norm: nn.Module | None
    """None: the layer is an MLP or a mixture alone, and has no `out`."""
    qkv: list[nn.Module]
    """The projections of attention; with `mixer` all linears of the layer's input."""
    head_norms: list[nn.Module]
    """RMSNorms of the heads of q and k; none if the architecture has none."""
    out: nn.Module | None
    mlp_norm: nn.Module | None
    """None: the layer is attention or a mixer alone, and has no `mlp`."""
    mlp: MLP | Mixture | None
    geometry: LayerGeometry
    query_factors: QueryFactors | None
    is_gated: bool = False
    """Whether attention has gates, as `AttentionPattern.is_gated`."""
    mixer: Mixer | None = None
    """Stands in place of attention; None: the layer attends."""
    factor: float = 1.0
    """Multiplies the results of attention, or the mixer, and of the MLP before they are added."""
    norms_behind: bool = False
    """Whether the norms are of these results, instead of the inputs."""

    @property
    def attends(self) -> bool:
        """Whether it has attention."""
        return self.out is not None and self.mixer is None


class DecoderStructure(NamedTuple):
    """A causal LM, or one with a head that classifies."""

    embedding: nn.Module
    rotary: nn.Module | None
    """None: nothing is rotated."""
    layers: list[DecoderLayer]
    norm: nn.Module
    head: nn.Module | None
    """The output head; None if a head classifies."""
    query_factors: QueryFactors | None
    """Multiplies the queries of every layer after their rotation; None: nothing does."""
    rotary_size: int
    """The first channels of a head, which are rotated; 0: none."""
    embedding_factor: float = 1.0
    """Multiplies embeddings."""
    logit_divisor: float = 1.0
    """Divides the outputs of the head."""
    has_precise_logits: bool = False
    """Whether these become float32 at last."""
    places: Sequence[int] = ()
    """Numbers of `layers` in the module, which may have layers of other stages too."""


def decoder_structure(
    module: PreTrainedModel, geometry: Sequence[LayerGeometry], *, takes_mixers: bool = False
) -> DecoderStructure:
    """The parts of `module`, whose weights are loaded. Raises `UnsupportedStructure` if it is not built as Llama is.

    `takes_mixers`: it may differ from Llama in the ways at the head of this file.
    """
    base = getattr(module, module.base_model_prefix)
    children = _parts(base)
    require(children.keys() - {"rotary"} == _BASE, f"{kind_of(base)} has other parts")
    layers, rotary = list(children["layers"].children()), children.get("rotary")
    require(len(layers) == len(geometry), f"{len(geometry)} of its {len(layers)} layers have attention")
    head = None if isinstance(found := module.get_output_embeddings(), AbsentHead) else found
    embedding_factor = _require_match(block_patterns.base_pattern(base)).number
    of_head = block_patterns.BlockPattern(None) if head is None else _require_match(block_patterns.head_pattern(module))
    positions = _tried_positions(module)
    dims = {one.head_dim_k for one in geometry if one.attends}
    require(len(dims) == 1, "its layers do not attend, or with heads of several sizes")
    rotary_size = 0 if rotary is None else _rotary_size(rotary, tensor_of(children["norm"]))
    form = _Form(positions, rotary_size, takes_mixers)
    require(takes_mixers or {rotary_size} == dims, "its rotations are of some channels")
    places = [index for index, layer in enumerate(layers) if not isinstance(layer, PassedLayer)]
    parts = [_layer(layers[index], geometry[index], form) for index in places]
    numbers = {embedding_factor, of_head.number, *(part.factor for part in parts)}
    is_plain = numbers == {1.0} and not of_head.is_precise
    require(takes_mixers or is_plain, "it multiplies embeddings, residuals or logits by numbers, or widens these")
    return DecoderStructure(
        embedding=children["embedding"],
        rotary=rotary,
        layers=parts,
        norm=children["norm"],
        head=head,
        query_factors=_common_factors([part for part in parts if part.attends], positions),
        rotary_size=rotary_size,
        embedding_factor=embedding_factor,
        logit_divisor=of_head.number,
        has_precise_logits=of_head.is_precise,
        places=places,
    )


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    """The children of a module by their roles."""
    children = dict(module.named_children())
    names = names_by_role(children)
    if names is None:
        raise UnsupportedStructure(f"{kind_of(module)} has other parts")
    return {role: children[name] for role, name in names.items()}


def _require_match(pattern: block_patterns.BlockPattern) -> block_patterns.BlockPattern:
    """The pattern itself. Raises `UnsupportedStructure` if it is not matched."""
    require_pattern(pattern.reason)
    return pattern


def _rotary_size(rotary: nn.Module, like: Tensor) -> int:
    """Channels of a head that `rotary` rotates."""
    positions = torch.zeros(1, 1, dtype=torch.int64, device=like.device)
    try:
        with torch.no_grad():
            cos, _ = rotary(like[None, None], position_ids=positions)
    except Exception as problem:  # foreign modules may fail in any way
        raise UnsupportedStructure(f"{kind_of(rotary)} does not run as Llama's does ({problem})") from None
    require(cos.dtype == like.dtype, "its rotations have another dtype than its weights")
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


class _Form(NamedTuple):
    """The extent to which layers may differ from Llama's."""

    positions: Tensor
    """int64 [T]: those at which factors of queries are tried."""
    rotary_size: int
    takes_mixers: bool


class _Mixing(NamedTuple):
    """The part of a layer between its two norms."""

    inputs: list[nn.Module]
    out: nn.Module
    head_norms: Sequence[nn.Module] = ()
    query_factors: QueryFactors | None = None
    is_gated: bool = False
    mixer: Mixer | None = None


def _layer(layer: nn.Module, geometry: LayerGeometry, form: _Form) -> DecoderLayer:
    children = _parts(layer)
    if children.keys() == {"norm", "half"}:
        return _half_layer(layer, children, geometry, form)
    role = "mixer" if "mixer" in children else "attention"
    first, second = norms = ("mlp_norm", "norm_behind") if "norm_behind" in children else ("attention_norm", "mlp_norm")
    others = children.keys() - {role, *norms}
    require(len(children) - len(others) == 3 and others in _FEED_FORWARDS, f"{kind_of(layer)} has other parts")
    require(form.takes_mixers or role == "attention", "some of its layers keep states")
    require(form.takes_mixers or (others == {"mlp"} and second == "mlp_norm"), f"{kind_of(layer)} has other parts")
    mlp = feed_forward({name: children[name] for name in others})
    require_no_tensors(layer)
    mixing = _attention(layer, children[role], geometry, form)
    return DecoderLayer(
        attention_norm=children[first],
        qkv=mixing.inputs,
        head_norms=[*mixing.head_norms],
        out=mixing.out,
        mlp_norm=children[second],
        mlp=mlp,
        geometry=geometry,
        query_factors=mixing.query_factors,
        is_gated=mixing.is_gated,
        mixer=mixing.mixer,
        norms_behind=second == "norm_behind",
        factor=_require_match(block_patterns.layer_pattern(layer)).number,
    )


def _half_layer(layer: nn.Module, children: dict[str, nn.Module], geometry: LayerGeometry, form: _Form) -> DecoderLayer:
    """A layer with attention, a mixer, an MLP or a mixture alone."""
    require(form.takes_mixers, f"{kind_of(layer)} has other parts")
    require_no_tensors(layer)
    mixes = geometry.attends or geometry.state is not None
    mixing = _attention(layer, children["half"], geometry, form) if mixes else None
    return DecoderLayer(
        attention_norm=children["norm"] if mixing is not None else None,
        qkv=[] if mixing is None else mixing.inputs,
        head_norms=[] if mixing is None else [*mixing.head_norms],
        out=None if mixing is None else mixing.out,
        mlp_norm=children["norm"] if mixing is None else None,
        mlp=mlp_structure(children["half"]) if mixing is None else None,
        geometry=geometry,
        query_factors=None if mixing is None else mixing.query_factors,
        is_gated=mixing is not None and mixing.is_gated,
        mixer=None if mixing is None else mixing.mixer,
        factor=_require_match(block_patterns.layer_pattern(layer)).number,
    )


def _attention(layer: nn.Module, attention: nn.Module, geometry: LayerGeometry, form: _Form) -> _Mixing:
    """The attention of a layer, or the mixer that stands in its place."""
    if geometry.state is not None:
        return _mixer(layer, attention, geometry)
    require(geometry.attends, f"{kind_of(layer)} does not attend")
    inner = _parts(attention)
    head_norms = [inner.pop(role) for role in ("q_norm", "k_norm") if role in inner]
    require(inner.keys() == {"q", "k", "v", "out"} and len(head_norms) != 1, f"{kind_of(attention)} has other parts")
    require(not geometry.has_sinks, "its attention has sinks")
    require_no_tensors(attention)
    require(len({parameter.dtype for parameter in layer.parameters()}) == 1, "its weights have several dtypes")
    check_linears(inner.values())
    is_partial = form.rotary_size != geometry.head_dim_k
    sizes = (form.rotary_size,) if is_partial else ()
    whole = [tensor_of(norm).numel() for norm in head_norms] == [
        heads * geometry.head_dim_k for heads in (geometry.num_heads, geometry.num_kv_heads)
    ] and geometry.num_heads > 1
    require(form.takes_mixers or not whole, "its norms of queries span more than one head")
    pattern = layer_patterns.attention_pattern(attention, geometry, form.positions, *sizes, norms_whole=whole)
    require_pattern(pattern.reason)
    require(form.takes_mixers or not pattern.is_gated, "its attention has gates")
    inputs = [inner[role] for role in ("q", "k", "v")]
    return _Mixing(inputs, inner["out"], head_norms, pattern.query_factors, pattern.is_gated)


def _mixer(layer: nn.Module, module: nn.Module, geometry: LayerGeometry) -> _Mixing:
    state, inner = geometry.state, dict(module.named_children())
    require(state is not None and not geometry.attends, f"{kind_of(layer)} attends and keeps a state")
    assert state is not None, "as required"
    pattern: DeltaPattern | MambaPattern | ConvolutionPattern
    if state.recurrence is None:
        pattern, inputs = convolution_pattern(module, state), ["in_proj"]
    elif "in_proj" in inner:
        pattern, inputs = mamba_pattern(module, state), ["in_proj"]
    else:
        pattern = delta_pattern(module, state)
        inputs = [*pattern.inputs]
    require_pattern(pattern.reason)
    norm_name, out = (pattern.norm, pattern.out) if isinstance(pattern, DeltaPattern) else ("norm", "out_proj")
    norm = inner.get(norm_name)
    own = [*module.parameters(recurse=False), *(() if norm is None else norm.parameters())]  # read as float32
    others = {parameter.dtype for parameter in layer.parameters() if not any(parameter is each for each in own)}
    require(len(others) == 1, "its weights have several dtypes")
    linears = [inner[name] for name in inputs]
    check_linears([*linears, inner[out]])
    convolution = inner["conv" if state.recurrence is None else "conv1d"]
    return _Mixing(linears, inner[out], mixer=Mixer(module, convolution, norm, pattern))
