"""The weights of a module built as Llama is, or as Qwen3.5 is, as the Triton kernels of a fused decoder take them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.triton.matmul import Tile, tile_for
from rollout_engine.kernels.triton.rotary import Rotary
from rollout_engine.model.cuda.delta_net import DeltaNet, delta_operands
from rollout_engine.model.cuda.experts import Experts
from rollout_engine.model.modules import decoder_structure as structure
from rollout_engine.model.modules import feed_forwards
from rollout_engine.model.modules.expert_patterns import RouterPattern, are_gated_experts, router_pattern
from rollout_engine.model.modules.geometry import LayerGeometry, keeps_states
from rollout_engine.model.modules.module_patterns import is_gated_mlp, offset_norm_epsilon, rms_norm_epsilon
from rollout_engine.model.modules.structure_checks import UnsupportedStructure, require
from rollout_engine.model.packing.linear_groups import stacked
from rollout_engine.model.packing.module_types import tensor_of
from rollout_engine.model.ranks.cut import outputs_of
from rollout_engine.model.ranks.wiring import Joins, OwnRows, joins_of


class Linear(NamedTuple):
    """Stacked weights [N, K] of linears that share an input, read from the memory that updates write."""

    weight: Tensor
    bias: Tensor | None
    """[N]."""
    tile: Tile
    """That of all ranks' rows together, so that no bit depends on how they are cut."""
    num_outputs: int
    """Outputs of all ranks."""
    group: int
    """Its number in an `AdapterPool`."""
    joins: Joins


class Norm(NamedTuple):
    """RMSNorm."""

    weight: Tensor
    epsilon: float
    has_offset: bool
    """Whether it multiplies by 1 + weight."""


class MLP(NamedTuple):
    """down(silu(gate(x)) * up(x))."""

    gate_up: Linear
    down: Linear


class Mixture(NamedTuple):
    """Router and experts of a layer that has a mixture of experts."""

    router: Linear
    experts: Experts
    shared: MLP | None
    """Computes every token, in addition to its experts."""
    shared_gate: Linear | None
    """Its one output's sigmoid multiplies that of `shared`."""


class Attention(NamedTuple):
    """Attention of a layer."""

    qkv: Linear
    head_norms: tuple[Norm, Norm] | None
    """The norms of the heads of q and of k."""
    is_gated: bool
    """Whether each head of q is followed by a gate, whose sigmoid multiplies the head's output."""
    geometry: LayerGeometry
    params: AttentionParams


class Mixer(NamedTuple):
    """A gated delta rule in place of attention."""

    inputs: list[Linear]
    """Their outputs, side by side, have the columns that `delta` reads."""
    delta: DeltaNet


class Layer(NamedTuple):
    """One decoder layer."""

    attention_norm: Norm
    mixing: Attention | Mixer
    out: Linear
    mlp_norm: Norm
    mlp: MLP | Mixture


class Parts(NamedTuple):
    """A causal LM."""

    embedding: Tensor
    """[V, H], of which this rank may have only some rows."""
    own_rows: OwnRows | None
    """Looks rows of other ranks up; None if this one has all."""
    rotary: Rotary
    layers: list[Layer]
    norm: Norm
    head: Linear
    query_factors: Tensor | None
    """[P] by position, of queries after their rotation; None: there are none."""


def parts_of(module: PreTrainedModel, geometry: Sequence[LayerGeometry], num_positions: int) -> Parts:
    """Parts of `module`, whose weights will not move. Raises `UnsupportedStructure` if it is not built as Llama is.

    If layers keep states, it may be built as Qwen3-Next and Qwen3.5 are.
    """
    found = structure.decoder_structure(module, geometry, takes_mixers=keeps_states(geometry))
    require(type(found.embedding) is nn.Embedding, "its embedding is more than a table")
    if found.head is None:
        raise UnsupportedStructure("it has no output head")
    if found.rotary is None:
        raise UnsupportedStructure("it rotates nothing")
    is_plain = found.embedding_factor == found.logit_divisor == 1.0 and not found.has_precise_logits
    require(is_plain, "it multiplies embeddings or logits by numbers, or widens these")
    weight, factors = tensor_of(found.embedding).detach(), found.query_factors
    positions = torch.arange(num_positions, device=weight.device)
    cos, sin = found.rotary(weight[:1, None], position_ids=positions[None])
    return Parts(
        embedding=weight,
        own_rows=getattr(found.embedding, "_own_rows", None),
        rotary=Rotary(cos[0].contiguous(), sin[0].contiguous()),
        layers=_layers(found.layers),
        norm=_norm(found.norm),
        head=_linear([found.head]),
        query_factors=None if factors is None else factors.table(num_positions, weight),
    )


def _layers(layers: Sequence[structure.DecoderLayer]) -> list[Layer]:
    num_mixtures, found = 0, []
    for layer in layers:
        found.append(_layer(layer, num_mixtures))
        num_mixtures += isinstance(layer.mlp, feed_forwards.Mixture)
    return found


def _layer(layer: structure.DecoderLayer, place: int) -> Layer:
    """`place`: its number among layers with experts, if it has some."""
    mixing: Attention | Mixer
    if layer.mixer is None:
        mixing = _attention(layer)
    else:
        mixing = Mixer([_linear([each]) for each in layer.qkv], delta_operands(layer.mixer, layer.geometry))
    require(layer.factor == 1.0, "it multiplies residuals by a number")
    require(not layer.norms_behind, "its norms are of results")
    return Layer(
        attention_norm=_norm(layer.attention_norm),
        mixing=mixing,
        out=_linear([] if layer.out is None else [layer.out]),
        mlp_norm=_norm(layer.mlp_norm),
        mlp=_mixture(layer.mlp, place) if isinstance(layer.mlp, feed_forwards.Mixture) else _mlp(layer.mlp),
    )


def _attention(layer: structure.DecoderLayer) -> Attention:
    head_norms = None
    if layer.head_norms:
        q, k = head_norms = _norm(layer.head_norms[0]), _norm(layer.head_norms[1])
        require(q[1:] == k[1:], "the norms of its queries and keys have different epsilons or offsets")
        require(len(q.weight) == layer.geometry.head_dim_k, "the norms of its queries span more than one head")
    params = layer.geometry.attention_params
    return Attention(_linear(layer.qkv), head_norms, layer.is_gated, layer.geometry, params)


def _mlp(mlp: feed_forwards.MLP | None) -> MLP:
    if mlp is None:
        raise UnsupportedStructure("some of its layers have no MLP")
    kind = type(mlp.module).__name__
    require(is_gated_mlp(mlp.module), f"{kind} does not compute down(silu(gate(x)) * up(x))")
    return MLP(_linear(mlp.gate_up), _linear([mlp.down]))


def _mixture(mixture: feed_forwards.Mixture, place: int) -> Mixture:
    kind, pattern = type(mixture.module).__name__, router_pattern(mixture.router)
    require(mixture.latents is None, f"the experts of {kind} compute latents")
    if pattern is None:
        raise UnsupportedStructure(f"{type(mixture.router).__name__} weights experts by a formula that no kernel has")
    require(mixture.latents is None, f"{kind} has latents")
    are_gated = are_gated_experts(mixture.experts)
    require(are_gated, f"{kind} does not weight and add down(silu(gate(x)) * up(x)) of its experts")
    gate_up, down = (tensor_of(mixture.experts, name).detach() for name in ("gate_up_proj", "down_proj"))
    require(gate_up.is_contiguous() and down.is_contiguous(), f"the experts of {kind} are not contiguous")
    router: Any = mixture.router
    weight = tensor_of(mixture.router).detach()
    tile = tile_for(len(weight), weight.shape[1], weight.dtype)
    own = getattr(mixture.experts, "_own_experts", None)
    return Mixture(
        router=Linear(weight, None, tile, len(weight), id(router), Joins(None, None)),
        experts=Experts(gate_up, down, router.top_k, pattern.routing, _bias(mixture, pattern), own, place),
        shared=None if mixture.shared is None else _mlp(mixture.shared),
        shared_gate=None if mixture.shared_gate is None else _linear([mixture.shared_gate]),
    )


def _bias(mixture: feed_forwards.Mixture, pattern: RouterPattern) -> Tensor | None:
    """The bias [E] with which the router chooses."""
    if not pattern.has_bias:
        return None
    is_own = pattern.bias_name is not None
    owner, name = (mixture.router, pattern.bias_name) if is_own else (mixture.module, mixture.bias_name)
    require(name is not None, "its router chooses with a bias, which its caller does not give")
    return tensor_of(owner, str(name)).detach()


def _norm(child: nn.Module | None) -> Norm:
    if child is None:
        raise UnsupportedStructure("some of its layers have one norm")
    epsilon = rms_norm_epsilon(child)
    found = offset_norm_epsilon(child) if epsilon is None else epsilon
    if found is None:
        raise UnsupportedStructure(f"{type(child).__name__} does not compute RMSNorm")
    return Norm(tensor_of(child).detach(), found, epsilon is None)


def _linear(modules: Sequence[nn.Module]) -> Linear:
    require(len(modules) > 0, "some of its layers have no attention")
    for child in modules:
        require(type(child) is nn.Linear, f"{type(child).__name__} is more than a linear layer")
    children = [child for child in modules if isinstance(child, nn.Linear)]
    weight = _view_fused([child.weight for child in children])
    require(bool(weight[0].any()), "its weights are zeros")
    biases = [child.bias for child in children if child.bias is not None]
    require(len(biases) in (0, len(children)), "only some of the linears that share an input have a bias")
    joins = joins_of(children[0])
    are_local = all(joins_of(child) == Joins(None, None) for child in children)
    require(len(children) == 1 or are_local, "linears that share an input are not cut by heads and columns")
    count = sum(outputs_of(child).whole for child in children)
    tile = tile_for(count, weight.shape[1], weight.dtype)
    return Linear(weight, _view_fused(biases) if biases else None, tile, count, id(children[0]), joins)


def _view_fused(parameters: Sequence[Tensor]) -> Tensor:
    """The parameters below one another, without a copy."""
    made = stacked([parameter.detach() for parameter in parameters])
    require(made.data_ptr() == parameters[0].data_ptr(), "weights that share an input are not fused")
    return made
