"""A composite's parts other than its text model: built on their own, and held below the text model as `pictures`.

    whole    model.visual.blocks.0...             model.language_model.layers.0...   lm_head
    engine   pictures.model.visual.blocks.0...    model.layers.0...                  lm_head

So the weights of both are loaded, updated, saved and put to sleep together.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rollout_engine.model.modules.composites import PICTURES, build_whole, remove_text
from rollout_engine.model.modules.construct import allocate
from rollout_engine.model.packing.linear_groups import fuse_projections, linear_groups
from rollout_engine.model.pictures.tower_forward import make_tower_exact


def image_token_id_of(config: PretrainedConfig) -> int | None:
    """The id of the placeholder tokens of pictures; None if the model's configuration names none."""
    found = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    return next((each for each in found if isinstance(each, int)), None)


def build_tower(
    config: PretrainedConfig, dtype: torch.dtype, check: Callable[[PreTrainedModel], None], *, fuses: bool = True
) -> PreTrainedModel:
    """The parts of the composite of `config`, with uninitialised weights on the CPU.

    `check` is called before they have memory, and may raise. `fuses`: projections of one input are slices of one
    buffer. Raises `Refusal` if transformers cannot build it.
    """
    tower = build_whole(config, dtype=dtype)
    remove_text(tower)
    check(tower)
    allocate(tower, dtype)
    if fuses:
        fuse_projections(tower)
    return tower


def attach_tower(
    text: nn.Module, tower: PreTrainedModel, make_row_invariant: Callable[[nn.Module], None]
) -> PreTrainedModel:
    """Make a tower exact and put it below its text model, in place; returns it.

    Raises `kernels.linear.NotInvariant` if this machine has no product for it.
    """
    make_tower_exact(tower, make_row_invariant)
    for group in linear_groups(tower):
        group.prove()
    text.add_module(PICTURES, tower)
    return tower
