"""Cuts a built module: over the ranks of an engine, or its experts over the engines of a group."""

import torch
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
from rollout_engine.model.ranks.part import part_of
from rollout_engine.model.ranks.seat import Seat


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
    cut = cut_module(module, geometry, seat, keep_values=keep_values)
    if device.type != "cpu":  # only now: the whole may not fit there
        place_on(module, device, keep_values=keep_values)
    fuse_projections(module)
    return _with_parts(cut, module, tower, whole)


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
    return None if cut is None else _with_parts(cut, module, None, whole)


def _with_parts(cut: ModelCut, module: PreTrainedModel, tower: PreTrainedModel | None, whole: WeightTable) -> ModelCut:
    """`cut` with the part of `module` that each name of `whole` has."""
    live = module.state_dict(keep_vars=True)
    if tower is not None:
        live |= {f"{PICTURES}.{name}": tensor for name, tensor in tower.state_dict(keep_vars=True).items()}
    parts = {}
    for name, view in whole.views.items():
        owner = whole.owners[name]
        held = live[owner].detach(), cut.shares.get(owner), cut.columns.get(owner)
        parts[name] = part_of(name, view, whole.views[owner], *held)
    return cut._replace(whole=whole.views, parts=parts)
