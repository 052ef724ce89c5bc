"""The parts of a Hugging Face module built as Llama is. Only such modules have layers that a fused decoder can run.

Some decoders also run layers with a mixer in place of attention, gates of attention, partial rotations or none, and the
numbers by which Granite multiplies residuals and embeddings and divides logits.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout_engine.model.modules import block_patterns, layer_patterns
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.layer_patterns import QueryFactors
from rollout_engine.model.modules.mamba_patterns import MambaPattern, mamba_pattern
from rollout_engine.model.modules.mixer_patterns import DeltaPattern, delta_pattern
from rollout_engine.model.modules.mixture_patterns import MixtureParts, mixture_pattern
from rollout_engine.model.modules.module_patterns import LLAMA_MLP, MLP_NAMES
from rollout_engine.model.modules.part_names import names_by_role
from rollout_engine.model.modules.positions import far_starts
from rollout_engine.model.modules.short_convolution_patterns import ConvolutionPattern, convolution_pattern
from rollout_engine.model.packing.module_types import tensor_of

_BASE = {"embedding", "layers", "last_norm"}
_FEED_FORWARDS = ({"mlp"}, {"mixture"}, {"shared_mlp"}, {"mixture", "shared_mlp"})
"""Roles of the parts that follow a layer's second norm."""
_ROUTERS = {"gate", "router"}
_EXPERTS = "experts"


class UnsupportedStructure(Exception):
    """Why the layers of a module must run as modules."""


class MLP(NamedTuple):
    """down(activation(gate(x)) * up(x))."""

    module: nn.Module
    gate_up: list[nn.Module]
    """Linears whose outputs, side by side, are gate and up."""
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

    attention_norm: nn.Module
    qkv: list[nn.Module]
    """The projections of attention; with `mixer` all linears of the layer's input."""
    head_norms: list[nn.Module]
    """RMSNorms of the heads of q and k; none if the architecture has none."""
    out: nn.Module
    mlp_norm: nn.Module
    mlp: MLP | Mixture
    geometry: LayerGeometry
    query_factors: QueryFactors | None
    is_gated: bool = False
    """Whether attention has gates, as `AttentionPattern.is_gated`."""
    mixer: Mixer | None = None
    """Stands in place of attention; None: the layer attends."""
    factor: float = 1.0
    """Multiplies the results of attention, or the mixer, and of the MLP before they are added."""


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


def decoder_structure(
    module: PreTrainedModel, geometry: Sequence[LayerGeometry], *, takes_mixers: bool = False
) -> DecoderStructure:
    """The parts of `module`, whose weights are loaded. Raises `UnsupportedStructure` if it is not built as Llama is.

    `takes_mixers`: it may differ from Llama as the head of this file says.
    """
    base = getattr(module, module.base_model_prefix)
    children = _parts(base)
    require(children.keys() - {"rotary"} == _BASE, f"{_kind(base)} has other parts")
    layers, rotary = list(children["layers"].children()), children.get("rotary")
    require(len(layers) == len(geometry), f"{len(geometry)} of its {len(layers)} layers have attention")
    head = module.get_output_embeddings()
    embedding_factor = _required_number(block_patterns.base_pattern(base))
    divisor = 1.0 if head is None else _required_number(block_patterns.head_pattern(module))
    positions = _tried_positions(module)
    dims = {one.head_dim_k for one in geometry if one.attends}
    require(len(dims) == 1, "its layers do not attend, or with heads of several sizes")
    rotary_size = 0 if rotary is None else _rotary_size(rotary, tensor_of(children["last_norm"]))
    form = _Form(positions, rotary_size, takes_mixers)
    require(takes_mixers or {rotary_size} == dims, "its rotations are of some channels")
    parts = [_layer(layer, one, form) for layer, one in zip(layers, geometry, strict=True)]
    numbers = {embedding_factor, divisor, *(part.factor for part in parts)}
    require(takes_mixers or numbers == {1.0}, "it multiplies embeddings, residuals or logits by numbers")
    return DecoderStructure(
        embedding=children["embedding"],
        rotary=rotary,
        layers=parts,
        norm=children["last_norm"],
        head=head,
        query_factors=_common_factors([part for part in parts if part.mixer is None], positions),
        rotary_size=rotary_size,
        embedding_factor=embedding_factor,
        logit_divisor=divisor,
    )


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    """The children of a module by their roles."""
    children = dict(module.named_children())
    names = names_by_role(children)
    if names is None:
        raise UnsupportedStructure(f"{_kind(module)} has other parts")
    return {role: children[name] for role, name in names.items()}


def _required_number(pattern: block_patterns.BlockPattern) -> float:
    """The number of a pattern. Raises `UnsupportedStructure` if the pattern is not matched."""
    _require_pattern(pattern.reason)
    return pattern.number


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
    role = "mixer" if "mixer" in children else "attention"
    others = children.keys() - {role, "attention_norm", "mlp_norm"}
    require(len(children) - len(others) == 3 and others in _FEED_FORWARDS, f"{_kind(layer)} has other parts")
    require(form.takes_mixers or role == "attention", "some of its layers keep states")
    require(form.takes_mixers or others == {"mlp"}, f"{_kind(layer)} has other parts")
    mlp = _feed_forward({name: children[name] for name in others})
    _require_no_tensors(layer)
    mixing = _attention(layer, children[role], geometry, form)
    pattern = block_patterns.layer_pattern(layer)
    _require_pattern(pattern.reason)
    return DecoderLayer(
        attention_norm=children["attention_norm"],
        qkv=mixing.inputs,
        head_norms=[*mixing.head_norms],
        out=mixing.out,
        mlp_norm=children["mlp_norm"],
        mlp=mlp,
        geometry=geometry,
        query_factors=mixing.query_factors,
        is_gated=mixing.is_gated,
        mixer=mixing.mixer,
        factor=pattern.number,
    )


def _attention(layer: nn.Module, attention: nn.Module, geometry: LayerGeometry, form: _Form) -> _Mixing:
    """The attention of a layer, or the mixer that stands in its place."""
    if geometry.state is not None:
        return _mixer(layer, attention, geometry)
    require(geometry.attends, f"{_kind(layer)} does not attend")
    inner = _parts(attention)
    head_norms = [inner.pop(role) for role in ("q_norm", "k_norm") if role in inner]
    require(inner.keys() == {"q", "k", "v", "out"} and len(head_norms) != 1, f"{_kind(attention)} has other parts")
    require(not geometry.has_sinks, "its attention has sinks")
    _require_no_tensors(attention)
    require(len({parameter.dtype for parameter in layer.parameters()}) == 1, "its weights have several dtypes")
    _check_linears(inner.values())
    is_partial = form.rotary_size != geometry.head_dim_k
    sizes = (form.rotary_size,) if is_partial else ()
    pattern = layer_patterns.attention_pattern(attention, geometry, form.positions, *sizes)
    _require_pattern(pattern.reason)
    require(form.takes_mixers or not pattern.is_gated, "its attention has gates")
    inputs = [inner[role] for role in ("q", "k", "v")]
    return _Mixing(inputs, inner["out"], head_norms, pattern.query_factors, pattern.is_gated)


def _mixer(layer: nn.Module, module: nn.Module, geometry: LayerGeometry) -> _Mixing:
    state, inner = geometry.state, dict(module.named_children())
    require(state is not None and not geometry.attends, f"{_kind(layer)} attends and keeps a state")
    assert state is not None, "as required"
    pattern: DeltaPattern | MambaPattern | ConvolutionPattern
    if state.recurrence is None:
        pattern, inputs = convolution_pattern(module, state), ["in_proj"]
    elif "in_proj" in inner:
        pattern, inputs = mamba_pattern(module, state), ["in_proj"]
    else:
        pattern = delta_pattern(module, state)
        inputs = [*pattern.inputs]
    _require_pattern(pattern.reason)
    norm = inner.get("norm")
    own = [*module.parameters(recurse=False), *(() if norm is None else norm.parameters())]  # read as float32
    others = {parameter.dtype for parameter in layer.parameters() if not any(parameter is each for each in own)}
    require(len(others) == 1, "its weights have several dtypes")
    linears = [inner[name] for name in inputs]
    _check_linears([*linears, inner["out_proj"]])
    convolution = inner["conv" if state.recurrence is None else "conv1d"]
    return _Mixing(linears, inner["out_proj"], mixer=Mixer(module, convolution, norm, pattern))


def _feed_forward(children: dict[str, nn.Module]) -> MLP | Mixture:
    """The parts behind a layer's second norm, by their roles: an MLP, a mixture, or a mixture next to an MLP."""
    if "mixture" not in children:
        (only,) = children.values()
        return _mlp(only)
    mixture = _mlp(children["mixture"])
    require(isinstance(mixture, Mixture), f"{_kind(children['mixture'])} has no experts")
    assert isinstance(mixture, Mixture), "as required"
    if "shared_mlp" not in children:
        return mixture
    shared = _mlp(children["shared_mlp"])
    require(isinstance(shared, MLP) and mixture.shared is None, "it has several shared experts")
    assert isinstance(shared, MLP), "as required"
    return mixture._replace(shared=shared)


def _require_no_tensors(module: nn.Module) -> None:
    """Raise `UnsupportedStructure` if a module has tensors that are not its children's."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    require(not own, f"{_kind(module)} has tensors of its own")


def _mlp(mlp: nn.Module) -> MLP | Mixture:
    children = dict(mlp.named_children())
    if _EXPERTS in children:
        return _mixture(mlp, children)
    names = next((each for each in MLP_NAMES if children.keys() >= {*each.linears}), None)
    if names is None:
        raise UnsupportedStructure(f"{_kind(mlp)} has other parts")
    _require_no_tensors(mlp)
    _check_linears(children[name] for name in names.linears)
    return MLP(mlp, [children[name] for name in names.gate_up], children[names.down])


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
    shared = [name for name, child in others.items() if dict(child.named_children()).keys() >= {*LLAMA_MLP.linears}]
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
