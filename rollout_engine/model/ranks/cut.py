"""Cuts a module over ranks by the model's own tensor-parallel plan.

Weights are cut by their output rows: every element of every product is then computed whole on one rank, so that no bit
depends on the number of ranks. The plan marks products that may follow one another without their whole outputs:

    colwise     q, k, v: by heads; gate, up         the rank's own columns are passed on
    rowwise     o, down                             reads whole rows, which are gathered; so is its result
    *_gather_output  *_rep  *_split_input           whole rows in and out

If a `Seat` splits sums, o and down, unless they have a bias, are cut by their input columns instead: they read the
rank's own, and the ranks' results are added up. That is two exchanges a layer instead of four.

Attention that caches latents is cut by heads, under any plan; every rank holds all latents.

If the plan was not written for this structure, products take whole rows in and give whole rows out, which is
always right. Those of mixers do, whatever the plan: each rank computes some heads of a recurrence and keeps their
states, and the heads' outputs are gathered. Experts are divided as wholes. Modules that the plan leaves out (norms,
routers) are whole on every rank.
A model with an expert-parallel plan alone, such as gpt-oss, is cut by that.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.latent_attention import LatentAttention
from rollout_engine.model.modules.mixers import Mixer
from rollout_engine.model.modules.module_patterns import is_gated_mlp
from rollout_engine.model.ranks.expert_group import ExpertGroup
from rollout_engine.model.ranks.part import Part
from rollout_engine.model.ranks.seat import Seat
from rollout_engine.model.ranks.share import Share, share_of
from rollout_engine.model.ranks.tensor_plan import LAST, QKV, has_many_outputs, plan_of

_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
_ATTENTION_PARTS = {*QKV, *LAST, *_NORMS}


class LinearCut(NamedTuple):
    """A linear cut by its outputs, or by its inputs."""

    module: nn.Module
    share: Share
    """The output features that the rank computes."""
    input_share: Share | None
    """The input features that the rank has, if the products before have left each rank its own; None: it has all."""
    result: Literal["kept", "gathered", "added"]
    """Whether each rank keeps its result, or all gather them, or add them up. Only if results are added does the
    product read `input_share` alone; else all of its inputs are gathered first."""


class ModelCut(NamedTuple):
    """A rank's part of a module."""

    seat: Seat
    linears: list[LinearCut]
    experts: list[tuple[nn.Module, Share]]
    mixers: list[tuple[nn.Module, Share]]
    """Those whose recurrence is computed by heads, and the heads that the rank computes."""
    embedding: tuple[nn.Embedding, Share] | None
    shares: dict[str, Share]
    """The rows of each parameter that is cut by rows, by the module's name of it."""
    columns: dict[str, Share]
    """The columns of each that is cut by columns."""
    geometry: list[LayerGeometry]
    """Geometry of the layers with the rank's own heads."""
    whole: dict[str, Tensor]
    """Every accepted name as a view of the weights as they were before, without values."""
    parts: dict[str, Part]
    """The parts that the rank holds, by name."""
    stage: Any = None
    """The rank's stage, a `ranks.stages.Stage`, if layers are divided among several."""
    group: ExpertGroup | None = None
    """The group whose engines divide the experts, and nothing else; None if ranks of one engine divide the model."""

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether several ranks compute each layer."""
        return self.seat.num_ranks > 1

    @classmethod
    def none(cls, geometry: list[LayerGeometry], seat: Seat) -> "ModelCut":
        """That of a rank which computes its layers alone."""
        return cls(seat, [], [], [], None, {}, {}, geometry, {}, {})


def cut_module(
    module: PreTrainedModel,
    geometry: list[LayerGeometry],
    seat: Seat,
    *,
    keep_values: bool = False,
) -> ModelCut:
    """Replace the parameters of `module` by the rank's parts, uninitialised unless `keep_values`.

    Raises `ConfigError` if it cannot be cut for this number of ranks.
    """
    plan = plan_of(module)
    cut = ModelCut(seat, [], [], [], None, {}, {}, list(geometry), {}, {})
    for parent in module.modules():
        children = {name: child for name, child in parent.named_children() if id(child) in plan}
        if isinstance(parent, Mixer):
            _cut_mixer(cut, parent)
        elif isinstance(parent, LatentAttention):
            _cut_latents(cut, parent, children, plan)
        elif children and hasattr(parent, "layer_idx"):
            _cut_attention(cut, parent, children, plan)
        elif children:
            _cut_block(cut, parent, children, plan)
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    if isinstance(head, nn.Linear):
        cut.linears.append(LinearCut(head, _share(head.out_features, seat, "its vocabulary"), None, "gathered"))
    if isinstance(embedding, nn.Embedding):
        share = _share(embedding.num_embeddings, seat, "its vocabulary")
        cut = cut._replace(embedding=(embedding, share))
    replace_parameters(module, cut, keep_values=keep_values)
    return cut


def outputs_of(linear: nn.Linear) -> Share:
    """The output features of a linear that this rank computes: all, if it is not cut."""
    found: Share = getattr(linear, "_own_outputs", Share.all(linear.out_features))
    return found


def inputs_of(linear: nn.Linear) -> Share:
    """The input features of a linear that this rank multiplies: all, unless its sums are split."""
    found: Share = getattr(linear, "_own_inputs", Share.all(linear.in_features))
    return found


def _cut_attention(cut: ModelCut, parent: nn.Module, children: dict[str, nn.Module], plan: dict[int, str]) -> None:
    """Cut by heads, if `parent` is built as Llama's attention is; else have every product give whole rows.

    A query product may give each head a gate too, of the same size (Qwen3-Next). A plan that cuts it by columns implies
    that both are side by side.
    """
    index: Any = parent.layer_idx
    layer = cut.geometry[index]
    parts: dict[str, Any] = dict(parent.named_children())
    last = next((name for name in LAST if name in parts), "")
    is_known = parts.keys() <= _ATTENTION_PARTS and parts.keys() >= {*QKV, last} and not layer.has_sinks
    is_known = is_known and all(other.kv_layer is None for other in cut.geometry)  # readers of whole heads
    is_known = is_known and all(plan.get(id(parts[name])) == "colwise" for name in QKV)
    is_known = is_known and plan.get(id(parts[last])) == "rowwise" and not list(parent.parameters(recurse=False))
    norms = [p for name in _NORMS if name in parts for p in parts[name].parameters()]
    is_known = is_known and all(norm.numel() == layer.head_dim_k for norm in norms)
    dims = (layer.head_dim_k, layer.head_dim_k, layer.head_dim_v)
    counts = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    sizes = [count * dim for count, dim in zip(counts, dims, strict=True)]
    if is_known and parts["q_proj"].out_features == 2 * sizes[0]:
        dims, sizes = (2 * dims[0], *dims[1:]), [2 * sizes[0], *sizes[1:]]
    if not is_known or any(parts[name].out_features != size for name, size in zip(QKV, sizes, strict=True)):
        return _cut_block(cut, parent, children, plan)
    heads, kv_heads = _share_heads(layer, cut.seat)
    for name, share, dim in zip(QKV, (heads, kv_heads, kv_heads), dims, strict=True):
        cut.linears.append(LinearCut(parts[name], share.times(dim), None, "kept"))
    cut.linears.append(_last(cut, parts[last], heads.times(layer.head_dim_v), "its hidden size"))
    cut.geometry[index] = replace(layer, num_heads=heads.size, num_kv_heads=kv_heads.size)


def _cut_latents(cut: ModelCut, parent: Any, children: dict[str, nn.Module], plan: dict[int, str]) -> None:
    """Cut by heads; if these cannot be divided evenly, every rank computes all heads."""
    layer, latents = cut.geometry[parent.layer_idx], parent.kv_b_proj
    query = parent._modules.get("q_b_proj") or parent._modules.get("q_proj")
    last = parent._modules.get("o_proj")
    sizes = latents.nope_size + layer.head_dim_k - layer.head_dim_v, latents.value_size
    outputs = layer.num_heads * sizes[0], layer.num_heads * (latents.nope_size + latents.value_size)
    is_known = isinstance(query, nn.Linear) and isinstance(last, nn.Linear) and not layer.has_sinks
    is_known = is_known and (query.out_features, latents.out_features) == outputs
    is_known = is_known and last.in_features == layer.num_heads * latents.value_size
    if not is_known or layer.num_heads % cut.seat.num_ranks:
        others = {name: child for name, child in children.items() if child is not latents}
        return _cut_block(cut, parent, others, plan)
    heads, _ = _share_heads(layer, cut.seat)
    cut.linears.append(LinearCut(query, heads.times(sizes[0]), None, "kept"))
    cut.linears.append(LinearCut(latents, heads.times(latents.nope_size + latents.value_size), None, "kept"))
    cut.linears.append(_last(cut, last, heads.times(latents.value_size), "its hidden size"))
    cut.geometry[parent.layer_idx] = replace(layer, num_heads=heads.size)


def _cut_mixer(cut: ModelCut, mixer: Any) -> None:
    """Have its products give whole rows, and each rank compute some heads of its recurrence, and keep their states.

    Convolutions, norms, and recurrences whose heads cannot be divided evenly are computed whole on every rank.
    """
    for linear in mixer.modules():
        if isinstance(linear, nn.Linear) and has_many_outputs(linear):
            share = _share(linear.out_features, cut.seat, "a product")
            cut.linears.append(LinearCut(linear, share, None, "gathered"))
    layer = cut.geometry[mixer.layer_idx]
    if layer.state is None or layer.state.recurrence is None or layer.state.recurrence[0] % cut.seat.num_ranks:
        return
    num_heads, *sizes = layer.state.recurrence
    size = num_heads // cut.seat.num_ranks
    cut.mixers.append((mixer, Share(cut.seat.rank * size, (cut.seat.rank + 1) * size, num_heads)))
    state = replace(layer.state, recurrence=(size, *sizes))
    cut.geometry[mixer.layer_idx] = replace(layer, state=state)


def _share_heads(layer: LayerGeometry, seat: Seat) -> tuple[Share, Share]:
    """The query heads of a rank, and the key/value heads that these read, of which several ranks may have the same."""
    ranks, heads, kv_heads = seat.num_ranks, layer.num_heads, layer.num_kv_heads
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ConfigError(
            f"tensor_parallel_size={ranks} is not allowed: its {heads} query heads and {kv_heads} key/value heads "
            f"cannot be divided evenly. Give a number that divides {heads}, and divides {kv_heads} or is a multiple "
            "of it."
        )
    size = heads // ranks
    first = seat.rank * kv_heads // ranks
    own = Share(seat.rank * size, (seat.rank + 1) * size, heads)
    return own, Share(first, first + max(1, kv_heads // ranks), kv_heads)


def _cut_block(cut: ModelCut, parent: nn.Module, children: dict[str, nn.Module], plan: dict[int, str]) -> None:
    """Cut an MLP, whose activation needs each rank's own columns alone, or linears of an unknown structure."""
    is_local = is_gated_mlp(parent) and plan.get(id(parent.gate_proj)) == plan.get(id(parent.up_proj)) == "colwise"
    is_local = is_local and plan.get(id(parent.down_proj)) == "rowwise"
    child: Any
    for name, child in children.items():
        if plan[id(child)] == "experts":
            cut.experts.append((child, _share(child.down_proj.shape[0], cut.seat, "its experts")))
            continue
        if is_local and name == "down_proj":
            cut.linears.append(_last(cut, child, _share(child.in_features, cut.seat, "a product"), "a product"))
        else:
            share = _share(child.out_features, cut.seat, "a product")
            cut.linears.append(LinearCut(child, share, None, "kept" if is_local else "gathered"))


def _last(cut: ModelCut, linear: nn.Linear, inputs: Share, what: str) -> LinearCut:
    """The cut of a product that reads the columns of its `inputs` that each rank has computed."""
    if cut.seat.splits_sums and linear.bias is None:
        return LinearCut(linear, Share.all(linear.out_features), inputs, "added")
    return LinearCut(linear, _share(linear.out_features, cut.seat, what), inputs, "gathered")


def _share(whole: int, seat: Seat, what: str) -> Share:
    try:
        return share_of(whole, seat.rank, seat.num_ranks)
    except ValueError as problem:
        raise ConfigError(f"tensor_parallel_size={seat.num_ranks} is too many: {what}: {problem}.") from None


def _row_parameters(cut: ModelCut) -> Iterator[tuple[nn.Module, str, Share]]:
    """Module, attribute and rows of every parameter that is cut by rows; a tied one is yielded twice."""
    owners = [(each.module, each.share) for each in cut.linears if each.result != "added"] + cut.experts
    owners += [cut.embedding] if cut.embedding is not None else []
    for child, share in owners:
        for name, parameter in list(child.named_parameters(recurse=False)):
            yield child, name, _with_rest(share, len(parameter))


def _with_rest(share: Share, num_rows: int) -> Share:
    """`share` for a parameter of `num_rows`; the last rank has those beyond `share.whole`, which nothing reads."""
    stop = num_rows if share.stop == share.whole else share.stop
    return Share(share.first, stop, num_rows)


def replace_parameters(module: PreTrainedModel, cut: ModelCut, *, keep_values: bool) -> None:
    """Replace the parameters of `module` that `cut` divides by its parts, and note their rows and columns there."""
    names = {id(tensor): name for name, tensor in reversed(module.state_dict(keep_vars=True).items())}
    replaced: dict[int, nn.Parameter] = {}
    for child, attribute, share in _row_parameters(cut):
        before = child.get_parameter(attribute)
        if id(before) not in replaced:
            cut.shares[names[id(before)]] = share
            replaced[id(before)] = _own(before.data[share.rows], keep_values=keep_values)
        child.register_parameter(attribute, replaced[id(before)])
    for each in cut.linears:
        linear: Any = each.module
        inputs = each.input_share
        linear.out_features, linear._own_outputs = each.share.size, each.share
        if each.result == "added":
            assert inputs is not None, "sums are of parts of what it reads"
            cut.columns[names[id(linear.weight)]] = inputs
            linear.weight = _own(linear.weight.data[:, inputs.rows], keep_values=keep_values)
            linear.in_features, linear._own_inputs = inputs.size, inputs
    if cut.embedding is not None:
        embedding, share = cut.embedding
        embedding.num_embeddings, embedding.padding_idx = share.size, None


def _own(part: Tensor, *, keep_values: bool) -> nn.Parameter:
    make = torch.clone if keep_values else torch.empty_like
    return nn.Parameter(make(part, memory_format=torch.contiguous_format), requires_grad=False)
