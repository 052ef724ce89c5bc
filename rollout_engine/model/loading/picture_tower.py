"""Decides whether a composite's pictures are served, and builds its tower for them."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.pictures import PictureInfo
from rollout_engine.model.admission.tower_trial import tower_refusal
from rollout_engine.model.pictures.tower import build_tower, image_token_id_of

logger = logging.getLogger("rollout_engine")


class LoadedTower(NamedTuple):
    """What a model has for pictures."""

    tower: PreTrainedModel | None
    """A composite's parts other than its text model, with uninitialised weights; None: pictures are not served."""
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

    `check` is called with it before it has memory, and may raise.
    """
    image_token_id = image_token_id_of(hf_config)
    if hf_config.get_text_config() is hf_config or image_token_id is None:
        return LoadedTower(None, None)
    if config.max_prompt_pictures == 0:
        return _refused(image_token_id, "The engine was started with max_prompt_pictures=0.")
    if device.type != "cpu":
        return _refused(image_token_id, "Pictures are encoded on a CPU alone: use device='cpu'.")
    if reason := tower_refusal(hf_config):
        logger.info("Text alone is served. %s", reason)
        return _refused(image_token_id, reason)
    return LoadedTower(build_tower(hf_config, dtype, check), PictureInfo(image_token_id))


def _refused(image_token_id: int, reason: str) -> LoadedTower:
    return LoadedTower(None, PictureInfo(image_token_id, reason))
