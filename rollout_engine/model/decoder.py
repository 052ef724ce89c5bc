"""Run a Hugging Face module's decoder layers as one C++ call, where that is proven to be the same bits.

Which modules are built that way is found by their parts; that they compute nothing else, by `decoder_trial`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from rollout_engine.kernels import linear
from rollout_engine.kernels.cpu import attention
from rollout_engine.kernels.cpu.decoder import Decoder, LayerWeights, Norm, Product
from rollout_engine.kernels.scoring import Scoring
from rollout_engine.model.fusion import LinearGroup, RowInvariantLinear, linear_groups
from rollout_engine.model.geometry import LayerGeometry
from rollout_engine.model.packed_embedding import PackedEmbedding
from rollout_engine.model.row_invariance import RowInvariantMLP, RowInvariantRMSNorm

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}


class NotOurs(Exception):
    """Why the module itself must serve."""


class DecoderStack:
    """`module`, its layers compiled, over one KV pool. Raises `NotOurs` where its parts are not those of Llama.

    Weights may be written, replaced or repacked at any time: addresses are gathered anew at the next step. Where groups
    do not follow writes, only what they run from may move.
    """

    def __init__(self, module: nn.Module, geometry: Sequence[LayerGeometry], pool: Sequence[attention.Layer]) -> None:
        self._parts = _parts_of(module, geometry)
        self._geometry, self._pool = geometry, pool
        self._owners = [child._parameters for layer in self._parts.layers for child in layer.modules()]
        self._groups = [group for layer in self._parts.layers for group in linear_groups(layer)]
        self._stamp: list[int] = []
        self._decoder: Decoder | None = None

    def forward(self, token_ids: Tensor, positions: Tensor, plan: attention.Plan, rows: Tensor) -> Tensor:
        """token_ids and positions int64 [T] -> logits [len(rows), V] of these rows; KV is written as `plan` says."""
        decoder, parts = self._current(), self._parts
        hidden = parts.embedding(token_ids)
        cos, sin = parts.rotary(hidden[None], position_ids=positions[None])
        decoder.run(hidden, cos[0], sin[0], plan)
        logits: Tensor = parts.head(parts.norm(hidden[rows]))
        return logits

    def _current(self) -> Decoder:
        follow = any(group.follows_writes for group in self._groups)
        tensors = [t for owner in self._owners for t in owner.values() if t is not None] if follow else []
        stamp = [part for t in tensors for part in (t.data_ptr(), t._version)]
        stamp += [group.num_packs for group in self._groups]
        if self._decoder is None or stamp != self._stamp:
            layers = [_weights(layer, one) for layer, one in zip(self._parts.layers, self._geometry, strict=True)]
            stamp[-len(self._groups) :] = [group.num_packs for group in self._groups]
            self._decoder, self._stamp = Decoder(layers, self._pool), stamp
        return self._decoder

    def release(self) -> None:
        """Let go of packed weights and of the memory of activations until the next step."""
        self._decoder = None


class _Parts(NamedTuple):
    embedding: nn.Embedding
    rotary: nn.Module
    layers: list[nn.Module]
    norm: nn.Module
    head: nn.Module


def _parts_of(module: nn.Module, geometry: Sequence[LayerGeometry]) -> _Parts:
    """Raises `NotOurs` for any other structure than that of Llama."""
    base = getattr(module, module.base_model_prefix)
    children = dict(base.named_children())
    _demand(
        children.keys() == {"embed_tokens", "layers", "norm", "rotary_emb"}, f"{type(base).__name__} has other parts"
    )
    head = module.get_output_embeddings()
    _demand(type(children["embed_tokens"]) in (nn.Embedding, PackedEmbedding), "its embedding is more than a table")
    _demand(type(head) is RowInvariantLinear, "its head is not ours")
    layers = list(children["layers"])
    _demand(len(layers) == len(geometry), "its layers are not all the same")
    for layer, one in zip(layers, geometry, strict=True):
        _check_layer(layer, one)
    return _Parts(children["embed_tokens"], children["rotary_emb"], layers, children["norm"], head)


def _check_layer(layer: nn.Module, geometry: LayerGeometry) -> None:
    children = dict(layer.named_children())
    _demand(children.keys() == _LAYER, f"{type(layer).__name__} has other parts")
    inner = dict(children["self_attn"].named_children())
    names = inner.keys()
    _demand(
        names in (_PROJECTIONS, _PROJECTIONS | _HEAD_NORMS), f"{type(children['self_attn']).__name__} has other parts"
    )
    _demand(type(children["mlp"]) is RowInvariantMLP, f"{type(children['mlp']).__name__} is not ours")
    norms = [
        children["input_layernorm"],
        children["post_attention_layernorm"],
        *(inner[n] for n in names & _HEAD_NORMS),
    ]
    _demand(all(type(norm) is RowInvariantRMSNorm for norm in norms), f"{type(norms[0]).__name__} is not ours")
    _demand(not geometry.has_sinks, "its attention has sinks")
    owned = [
        child for child in (layer, children["self_attn"], children["mlp"]) if list(child.parameters(recurse=False))
    ]
    _demand(not owned, "its layers have parameters of their own")
    _demand(
        _group(inner["q_proj"]).children == [inner[n] for n in ("q_proj", "k_proj", "v_proj")], "q, k and v are apart"
    )
    mlp = children["mlp"]
    _demand(_group(mlp.gate_proj).children == [mlp.gate_proj, mlp.up_proj], "gate and up are apart")
    # Of a matrix of zeros, a trial learns nothing.
    matrices = [child.weight for child in layer.modules() if type(child) is RowInvariantLinear]
    _demand(all(bool(matrix[0].any()) for matrix in matrices), "its weights are zeros")


def _group(child: nn.Module) -> LinearGroup:
    _demand(type(child) is RowInvariantLinear, f"{type(child).__name__} is not ours")
    return child._group  # type: ignore[return-value]


def _demand(condition: bool, otherwise: str) -> None:
    if not condition:
        raise NotOurs(otherwise)


def _weights(layer: nn.Module, geometry: LayerGeometry) -> LayerWeights:
    inner = layer.self_attn
    has_norms = hasattr(inner, "q_norm")
    return LayerWeights(
        attention_norm=_norm(layer.input_layernorm),
        qkv=_product(inner.q_proj),
        q_norm=_norm(inner.q_norm) if has_norms else None,
        k_norm=_norm(inner.k_norm) if has_norms else None,
        out=_product(inner.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=_product(layer.mlp.gate_proj),
        down=_product(layer.mlp.down_proj),
        num_heads=geometry.num_heads,
        scoring=Scoring(geometry.scale, geometry.sliding_window or 0, geometry.softcap or 0.0),
    )


def _norm(child: nn.Module) -> Norm:
    return Norm(child.weight.detach(), child._epsilon)


def _product(child: nn.Module) -> Product:
    operand, bias, plan = _group(child).operand()
    _demand(plan.kernel == linear.OWN, "another library multiplies")
    return Product(operand, bias)
