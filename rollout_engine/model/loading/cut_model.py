"""Cuts a module that was built whole: over ranks, into stages, or its experts over engines, and names the parts."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.loading.weight_table import WeightTable
from rollout_engine.model.modules.composites import PICTURES
from rollout_engine.model.modules.construct import place_on
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.heads import HeadKind
from rollout_engine.model.packing.linear_groups import fuse_projections
from rollout_engine.model.ranks.cut import ModelCut, cut_module
from rollout_engine.model.ranks.divided_experts import divide_experts
from rollout_engine.model.ranks.expert_group import ExpertGroup
from rollout_engine.model.ranks.part import Part, part_of
from rollout_engine.model.ranks.seat import Seat
from rollout_engine.model.ranks.stages import cut_stage, plan_stages, stage_parts

_CPU = torch.device("cpu")


def cut_whole(
    module: PreTrainedModel,
    tower: PreTrainedModel | None,
    geometry: list[LayerGeometry],
    seat: Seat,
    whole: WeightTable,
    device: torch.device,
    *,
    keep_values: bool,
) -> ModelCut:
    """Cut `module`, which moves to `device`. Its parts have all the names that `whole` has.

    `tower`: every rank has all of it.
    """
    plan = None if seat.pipe is None else plan_stages(module, geometry, seat.pipe.num_stages)
    is_divided = plan is not None and seat.num_ranks == 1
    cut = ModelCut.none(geometry, seat) if is_divided else cut_module(module, geometry, seat, keep_values=keep_values)
    if plan is not None and seat.pipe is not None:
        cut = cut_stage(module, plan, cut, seat.pipe)
    if device != _CPU:  # only now: the whole may not fit there
        place_on(module, device, keep_values=keep_values)
    fuse_projections(module)
    live = module.state_dict(keep_vars=True)
    if tower is not None:
        live |= {f"{PICTURES}.{name}": tensor for name, tensor in tower.state_dict(keep_vars=True).items()}
    if plan is not None:
        return cut._replace(whole=whole.views, parts=stage_parts(whole.views, whole.owners, live, cut))
    return cut._replace(whole=whole.views, parts=_parts_of(cut, live, whole))


def divide_whole(
    module: PreTrainedModel,
    tower: PreTrainedModel | None,
    head_kind: HeadKind | None,
    geometry: list[LayerGeometry],
    group: ExpertGroup,
    whole: WeightTable,
    *,
    keep_values: bool,
) -> ModelCut | None:
    """Leave `module` this engine's experts, and all else; None if it has no experts, and stays as it is.

    Raises `ConfigError` for models whose experts are not divided over engines.
    """
    what = f"data_parallel_size={group.size}"
    if head_kind is not None:
        raise ConfigError(f"{what}: a checkpoint with a head that classifies is served by one engine. Leave it out.")
    if tower is not None:
        raise ConfigError(f"{what}: engines that divide experts take no pictures. Give max_prompt_pictures=0.")
    cut = divide_experts(module, geometry, group, keep_values=keep_values)
    if cut is None:
        return None
    return cut._replace(whole=whole.views, parts=_parts_of(cut, module.state_dict(keep_vars=True), whole))


def _parts_of(cut: ModelCut, live: Mapping[str, Tensor], whole: WeightTable) -> dict[str, Part]:
    """This process's part under each name of `whole`; `live`: its tensors, by the module's names."""
    parts = {}
    for name, view in whole.views.items():
        owner = whole.owners[name]
        held = live[owner].detach(), cut.shares.get(owner), cut.columns.get(owner)
        parts[name] = part_of(name, view, whole.views[owner], *held)
    return parts
