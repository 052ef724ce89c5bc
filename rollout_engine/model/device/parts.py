"""The parts of a Hugging Face module built as Llama is, as the kernels take them; others run as modules."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rollout_engine.kernels.scoring import Scoring
from rollout_engine.kernels.triton.rotary import HeadNorms, Rotary
from rollout_engine.model.decoder import NotOurs
from rollout_engine.model.formulas import is_gated_mlp, rms_norm_epsilon
from rollout_engine.model.fusion import stacked
from rollout_engine.model.geometry import LayerGeometry

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_QKV = ("q_proj", "k_proj", "v_proj")
_HEAD_NORMS = {"q_norm", "k_norm"}


class Linear(NamedTuple):
    """Weights [N, K] of linears that share an input, below one another, read where updates write them."""

    weight: Tensor
    bias: Tensor | None
    """[N]."""


class Norm(NamedTuple):
    """RMSNorm."""

    weight: Tensor
    epsilon: float


class Layer(NamedTuple):
    """One decoder layer."""

    attention_norm: Norm
    qkv: Linear
    head_norms: HeadNorms | None
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    geometry: LayerGeometry
    scoring: Scoring


class Parts(NamedTuple):
    """A causal LM."""

    embedding: Tensor
    """[V, H]."""
    rotary: Rotary
    layers: list[Layer]
    norm: Norm
    head: Linear


def parts_of(module: nn.Module, geometry: list[LayerGeometry], num_positions: int) -> Parts:
    """Of `module`, whose weights lie where they stay. Raises `NotOurs` for any other structure than that of Llama."""
    base = getattr(module, module.base_model_prefix)
    children = dict(base.named_children())
    expected = {"embed_tokens", "layers", "norm", "rotary_emb"}
    _demand(children.keys() == expected, f"{type(base).__name__} has other parts")
    _demand(type(children["embed_tokens"]) is nn.Embedding, "its embedding is more than a table")
    head = module.get_output_embeddings()
    _demand(type(head) is nn.Linear, "its head is more than a linear")
    layers = list(children["layers"])
    _demand(len(layers) == len(geometry), "its layers are not all the same")
    weight = children["embed_tokens"].weight.detach()
    positions = torch.arange(num_positions, device=weight.device)
    cos, sin = children["rotary_emb"](weight[:1, None], position_ids=positions[None])
    return Parts(
        embedding=weight,
        rotary=Rotary(cos[0].contiguous(), sin[0].contiguous()),
        layers=[_layer(layer, one) for layer, one in zip(layers, geometry, strict=True)],
        norm=_norm(children["norm"]),
        head=_linear([head]),
    )


def _layer(layer: nn.Module, geometry: LayerGeometry) -> Layer:
    children = dict(layer.named_children())
    _demand(children.keys() == _LAYER, f"{type(layer).__name__} has other parts")
    attention, mlp = children["self_attn"], children["mlp"]
    inner = dict(attention.named_children())
    names = {*_QKV, "o_proj"}
    _demand(inner.keys() in (names, names | _HEAD_NORMS), f"{type(attention).__name__} has other parts")
    _demand(is_gated_mlp(mlp), f"{type(mlp).__name__} computes something else")
    _demand(not geometry.has_sinks, "its attention has sinks")
    owned = [child for child in (layer, attention, mlp) if list(child.parameters(recurse=False))]
    _demand(not owned, "its layers have parameters of their own")
    norms = None
    if _HEAD_NORMS <= inner.keys():
        q, k = _norm(inner["q_norm"]), _norm(inner["k_norm"])
        _demand(q.epsilon == k.epsilon, "its queries and keys are normed differently")
        _demand(len(q.weight) == geometry.head_dim_k, "its norms are not those of heads")
        norms = HeadNorms(q.weight, k.weight, q.epsilon)
    return Layer(
        attention_norm=_norm(children["input_layernorm"]),
        qkv=_linear([inner[name] for name in _QKV]),
        head_norms=norms,
        out=_linear([inner["o_proj"]]),
        mlp_norm=_norm(children["post_attention_layernorm"]),
        gate_up=_linear([mlp.gate_proj, mlp.up_proj]),
        down=_linear([mlp.down_proj]),
        geometry=geometry,
        scoring=Scoring(geometry.scale, geometry.sliding_window or 0, geometry.softcap or 0.0),
    )


def _norm(child: nn.Module) -> Norm:
    epsilon = rms_norm_epsilon(child)
    if epsilon is None:
        raise NotOurs(f"{type(child).__name__} computes something else")
    return Norm(child.weight.detach(), epsilon)


def _linear(children: list[nn.Module]) -> Linear:
    _demand(all(type(child) is nn.Linear for child in children), "its linears are more than that")
    weight = _together([child.weight for child in children])
    _demand(bool(weight[0].any()), "its weights are zeros")  # of which a trial learns nothing
    biases = [child.bias for child in children if child.bias is not None]
    _demand(len(biases) in (0, len(children)), "some of its linears have a bias")
    return Linear(weight, _together(biases) if biases else None)


def _together(parameters: list[nn.Parameter]) -> Tensor:
    made = stacked([parameter.detach() for parameter in parameters])
    _demand(made.data_ptr() == parameters[0].data_ptr(), "weights that share an input are apart")
    return made


def _demand(condition: bool, otherwise: str) -> None:
    if not condition:
        raise NotOurs(otherwise)
