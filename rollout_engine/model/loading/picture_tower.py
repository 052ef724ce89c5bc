"""Decides whether a composite's pictures are served, and builds its tower for them."""

import copy
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.pictures import PictureInfo
from rollout_engine.model.admission.tower_trial import try_pictures
from rollout_engine.model.admission.unused_scales import keep_scales
from rollout_engine.model.loading.tower_files import divided_rows
from rollout_engine.model.loading.weight_table import WeightTable
from rollout_engine.model.modules.composites import PICTURES, TextPart, build_whole
from rollout_engine.model.modules.construct import allocate, initialize
from rollout_engine.model.pictures.tower import build_tower, image_token_id_of

logger = logging.getLogger("rollout_engine")


class LoadedTower(NamedTuple):
    """The parts of a model for pictures."""

    tower: PreTrainedModel | None
    """A composite's parts other than its text model; None: pictures are not served."""
    info: PictureInfo | None
    """How it takes pictures, or why not; None if it is no model of pictures."""


def load_tower(
    config: EngineConfig,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    check: Callable[[PreTrainedModel], None],
) -> LoadedTower:
    """The tower of the composite of `hf_config`, whose text model has passed the gate.

    Its weights are uninitialised, unless they are dummies. `check` is called before it has memory, and may raise.
    """
    image_token_id = image_token_id_of(hf_config)
    if hf_config.get_text_config() is hf_config or image_token_id is None:
        return LoadedTower(None, None)
    if config.max_prompt_pictures == 0:
        return _without_pictures(image_token_id, "The engine was started with max_prompt_pictures=0.")
    if config.pipeline_parallel_size > 1:
        return _without_pictures(image_token_id, "Stages do not take pictures: leave pipeline_parallel_size out.")
    if device.type != "cpu":
        return _without_pictures(image_token_id, "Pictures are encoded on a CPU alone: use device='cpu'.")
    trial = try_pictures(hf_config)
    if trial.refusal:
        logger.info("Text alone is served. %s", trial.refusal)
        return _without_pictures(image_token_id, trial.refusal)
    tower = build_tower(hf_config, dtype, check)
    if config.load_format == "dummy":
        initialize(tower)
    return LoadedTower(tower, PictureInfo(image_token_id, attention=trial.attention))


def table_of(text: PreTrainedModel, tower: PreTrainedModel | None) -> WeightTable:
    """The table of a text model's weights, and of its composite's other parts, if they are served."""
    table = WeightTable.of(text)
    return table if tower is None else table.with_part(f"{PICTURES}.", WeightTable.of(tower, divided_rows(tower)))


def join_parts(config: PretrainedConfig, text: PreTrainedModel, tower: PreTrainedModel) -> PreTrainedModel:
    """The composite of `config`, whose weights are those of `text` and `tower`, its parts; without copies.

    Raises `Refusal` if transformers cannot build it.
    """
    whole = build_whole(config, copy.deepcopy(text.config), text.dtype)
    allocate(whole, text.dtype)
    part, head = TextPart.of(whole), text.get_output_embeddings()
    assert isinstance(head, torch.nn.Module), "a causal LM"
    part.decoder.load_state_dict(text.base_model.state_dict(), assign=True)
    part.head.load_state_dict(head.state_dict(), assign=True)
    whole.load_state_dict(tower.state_dict(), strict=False, assign=True)
    whole.tie_weights()
    keep_scales(config.get_text_config(), whole.config.get_text_config())
    return whole


def _without_pictures(image_token_id: int, reason: str) -> LoadedTower:
    return LoadedTower(None, PictureInfo(image_token_id, reason))
