"""Cuts a module into stages: this rank's layers stay, and those of other stages are replaced.

The first stage has the embedding, the last one the head; each has all that is neither a layer nor one of these, such
as the norm behind the layers. A matrix that is both embedding and head is held by both stages.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.routed_experts import RoutingInfo
from rollout_engine.model.modules.geometry import LayerGeometry, probe_geometry
from rollout_engine.model.modules.layer_watch import layers_of
from rollout_engine.model.modules.passed_layers import AbsentEmbedding, AbsentHead, EntranceLayer, PassedLayer
from rollout_engine.model.modules.routers import routers_of, routing_info
from rollout_engine.model.ranks.cut import ModelCut
from rollout_engine.model.ranks.part import Part, Region, part_of
from rollout_engine.model.ranks.pipe import Pipe
from rollout_engine.model.ranks.stage_split import split_layers

_KNOWN_TENSORS = {"attention_mask", "position_ids", "position_embeddings", "cache_position"}
"""Arguments of layers that each stage computes separately, from positions."""


class Stage(NamedTuple):
    """A rank's stage of a module."""

    pipe: Pipe
    layers: range
    """Numbers of its layers."""
    num_layers: int
    """Layers of all stages."""
    geometry: list[LayerGeometry]
    """Geometry of the layers of all stages, with the heads of a rank."""
    routing: RoutingInfo | None
    """Sizes of all routers; None if they are not all alike, or there are none."""
    first_router: int
    """Routers of the stages before."""
    num_own_routers: int
    elsewhere: dict[str, tuple[int, int]]
    """Name of a linear of another stage -> its input and output features, before they were cut."""


class StagePlan(NamedTuple):
    """The division of a module, made while it is whole."""

    stages: list[range]
    layers: list[nn.Module]
    routing: RoutingInfo | None
    routers: list[nn.Module]
    linears: dict[str, tuple[int, int]]
    """Name of a linear in a layer -> its features."""
    num_outputs: list[int]
    """Length of the tuple that each layer returns; 0: a tensor."""


def plan_stages(module: PreTrainedModel, geometry: Sequence[LayerGeometry], num_stages: int) -> StagePlan:
    """Divide the layers of a whole module, whose weights may be uninitialised. Raises `ConfigError` if it cannot be."""
    layers = layers_of(module, len(geometry))
    num_outputs = _check_flow(module, layers)
    joined = set[int]()
    for index, layer in enumerate(geometry):
        if layer.kv_layer is not None:
            joined |= set(range(layer.kv_layer + 1, index + 1))
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise _not_divided(module, "its embedding is more than a table, or its head more than a product")
    counted = [_num_bytes(layer) for layer in layers]
    ends = dict(embedding=_num_bytes(embedding), head=_num_bytes(head))
    names = {id(layer): name for name, layer in module.named_modules()}
    linears = {
        f"{names[id(layer)]}.{name}": (child.in_features, child.out_features)
        for layer in layers
        for name, child in layer.named_modules()
        if isinstance(child, nn.Linear)
    }
    routers = routers_of(module)
    stages = split_layers(counted, **ends, num_stages=num_stages, joined=joined)
    return StagePlan(stages, layers, routing_info(routers), routers, linears, num_outputs)


def cut_stage(module: PreTrainedModel, plan: StagePlan, cut: ModelCut, pipe: Pipe) -> ModelCut:
    """Leave this rank's stage in `module`, which `cut` has cut over the ranks of a stage, or left whole."""
    own, layers = plan.stages[pipe.stage], plan.layers
    numbers = {id(child): index for index, layer in enumerate(layers) for child in layer.modules()}
    names = {id(layer): f"{name}." for name, layer in module.named_modules()}
    prefixes = tuple(names[id(layer)] for index, layer in enumerate(layers) if index not in own)
    gone = {child for child, index in numbers.items() if index not in own}
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if not pipe.is_first:
        gone.add(id(embedding))
        _replace_child(module, embedding, AbsentEmbedding(embedding))
    if not pipe.is_last:
        gone.add(id(head))
        _replace_child(module, head, AbsentHead(head))
    for index, layer in enumerate(layers):
        if index not in own:
            form: dict[str, Any] = dict(attends=cut.geometry[index].attends, num_outputs=plan.num_outputs[index])
            passed = PassedLayer(layer, **form)
            if index == own.start - 1:
                passed = EntranceLayer(layer, pipe.enter_module, **form)
            _replace_child(module, layer, passed)
    if not pipe.is_last:
        layers[own.stop - 1].register_forward_hook(lambda _, given, output: pipe.finish_module(_states_of(output)))
    blank = LayerGeometry.without_attention(None)
    places = [numbers.get(id(router)) for router in plan.routers]
    stage = Stage(
        pipe,
        own,
        len(layers),
        list(cut.geometry),
        plan.routing,
        sum(place is not None and place < own.start for place in places),
        sum(place is not None and place in own for place in places),
        {name: sizes for name, sizes in plan.linears.items() if name.startswith(prefixes)} if prefixes else {},
    )
    return cut._replace(
        linears=[each for each in cut.linears if id(each.module) not in gone],
        experts=[each for each in cut.experts if id(each[0]) not in gone],
        mixers=[each for each in cut.mixers if id(each[0]) not in gone],
        embedding=cut.embedding if pipe.is_first else None,
        geometry=[layer if index in own else blank for index, layer in enumerate(cut.geometry)],
        stage=stage,
    )


def stage_parts(
    views: Mapping[str, Tensor], owners: Mapping[str, str], live: Mapping[str, Tensor], cut: ModelCut
) -> dict[str, Part]:
    """The parts of a stage under every name of the whole module: nothing of the other stages.

    Args:
        views: every accepted name as a view of the whole weights.
        owners: the module's name of the parameter that a view is of; tied ones have one owner.
        live: the values of the stage, by the module's names.
    """
    held: dict[str, Tensor] = {}
    for name, owner in owners.items():
        found = live.get(name)
        if found is not None and (found.numel() or not views[owner].numel()):
            held.setdefault(owner, found.detach())
    parts = {}
    for name, view in views.items():
        owner = owners[name]
        if owner in held:
            shares = cut.shares.get(owner), cut.columns.get(owner)
            parts[name] = part_of(name, view, views[owner], held[owner], *shares)
        else:
            parts[name] = Part(view.new_empty(0, *view.shape[1:]), Region(0, 0))
    return parts


def _check_flow(module: PreTrainedModel, layers: Sequence[nn.Module]) -> list[int]:
    """The length of the tuple that each layer returns; 0: a tensor.

    Raises `ConfigError` unless each layer reads the output of the one before, and nothing else of earlier layers.
    """
    if not layers:
        raise _not_divided(module, "it has no list of decoder layers")
    seen: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            if seen.setdefault(id(parameter), index) != index:
                raise _not_divided(module, f"layers {seen[id(parameter)]} and {index} share weights")
    watch = _FlowWatch(layers)
    try:
        probe_geometry(module)
    finally:
        watch.end()
    if watch.reason:
        raise _not_divided(module, watch.reason)
    return watch.num_outputs


class _FlowWatch:
    """Watches the arguments of layers in one forward."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.reason = ""
        """Why layers cannot be divided, as half a sentence."""
        self.num_outputs = [0] * len(layers)
        """Length of the tuple that each layer returns; 0: a tensor."""
        self._before: Tensor | None = None
        self._hooks: list[RemovableHandle] = []
        for index, layer in enumerate(layers):
            self._hooks.append(layer.register_forward_pre_hook(self._begin(index), with_kwargs=True))
            self._hooks.append(layer.register_forward_hook(self._end(index)))

    def end(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, index: int) -> Any:
        def begin(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            named = {name: each for name, each in kwargs.items() if name != "hidden_states" and _has_tensor(each)}
            given = args[0] if args else kwargs.get("hidden_states")
            if self._before is not None and given is not self._before:
                self.reason = self.reason or f"layer {index} reads more than the output of the layer before"
            if len(args) > 1 and any(map(_has_tensor, args[1:])):
                self.reason = self.reason or f"layer {index} is given tensors without names"
            if others := sorted(named.keys() - _KNOWN_TENSORS):
                self.reason = self.reason or f"layer {index} is given {', '.join(others)}, which the first stage has"

        return begin

    def _end(self, index: int) -> Any:
        def end(layer: nn.Module, given: Any, output: Any) -> None:
            states = _states_of(output)
            if isinstance(output, tuple) and not _has_tensor(output[1:]):
                self.num_outputs[index] = len(output)
            elif output is not states:
                self.reason = self.reason or f"layer {index} returns more than hidden states"
            self._before = states

        return end


def _states_of(output: Any) -> Any:
    """The hidden states that a layer returns, alone or first of a tuple."""
    return output[0] if isinstance(output, tuple) and output else output


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(map(_has_tensor, value)))


def _replace_child(module: nn.Module, child: nn.Module, by: nn.Module) -> None:
    for parent in list(module.modules()):
        for name, each in list(parent._modules.items()):
            if each is child:
                parent._modules[name] = by


def _num_bytes(child: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in child.parameters())


def _not_divided(module: nn.Module, reason: str) -> ConfigError:
    return ConfigError(
        f"pipeline_parallel_size: {type(module).__name__} cannot be divided into stages: {reason}. Leave it out, or "
        "give tensor_parallel_size."
    )
