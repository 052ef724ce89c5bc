"""Calls of an exact composite with pictures, in the form of transformers' forward.

A hook on the composite takes the pictures out of a call before its own forward sees them, has them encoded one by one,
and leaves their features to the text model below (`modules.placed_features`).
"""

import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import PictureAttention, PlacedPicture
from rollout_engine.model.modules.composites import TextPart, is_composite
from rollout_engine.model.modules.placed_features import (
    OrdinaryTokens,
    PlacedFeatures,
    note_ordinary_tokens,
    place,
    take_placed_features,
)
from rollout_engine.model.pictures.tower_forward import make_tower_exact
from rollout_engine.model.training.batch_pictures import (
    ATTENTION,
    PictureBatch,
    TokenRun,
    sequences_of,
    split_pictures,
)
from rollout_engine.model.training.engine_features import FEATURES, features_by_digest

_NO_TOWER = "it has no vision tower that was made exact."
TYPES = "mm_token_type_ids"
_OLD_TYPES = "token_type_ids"
_state = threading.local()


def picture_inputs(composite: nn.Module) -> frozenset[str]:
    """Names of the tensors that transformers' forward of a composite takes for pictures."""
    function = getattr(composite, "get_image_features", None)
    if function is None:
        return frozenset()
    settings = {"self", "kwargs", "return_dict", "vision_feature_layer", "vision_feature_select_strategy"}
    return frozenset(inspect.signature(function).parameters) - settings


def make_pictures_exact(
    composite: Any,
    make_row_invariant: Callable[[nn.Module], None],
    reason: str,
    attention: PictureAttention = "causal",
) -> None:
    """Make the vision tower of a composite exact, in place, and allow calls with pictures; or have them refused.

    `make_row_invariant`: that of the device. `reason`: why they are refused, as a sentence; "": they are not.
    `attention`: which layers let a token of a picture see the whole picture. Calling it twice is harmless. Call it
    before `install_checks`.
    """
    inner = composite.base_model
    if not reason:
        make_tower_exact(composite, make_row_invariant)
        take_placed_features(TextPart.of(composite).decoder)
        if getattr(inner, "_exact_pictures_refused", None) is None:
            inner.register_forward_pre_hook(partial(_before, composite), with_kwargs=True)
            inner.register_forward_hook(_after, always_call=True)
    inner._exact_pictures_refused = reason
    setattr(inner, ATTENTION, attention)


def batch_features(
    composite: Any,
    input_ids: Tensor,
    real: Tensor,
    position_ids: Tensor | None,
    given: dict[str, Any],
    placed: Sequence[tuple[TokenRun, Sequence[PlacedPicture]]],
) -> PlacedFeatures | None:
    """The features of the pictures of a batch [B, T]; None if there are none.

    `real` bool [B, T]: not padding. `position_ids`: of packed rows, None for others. `given`: further arguments of
    `exact.token_logprobs`. `placed`: the pictures of a rollout, in place of these. Raises `ValueError` for arguments
    that are none of a picture, or do not fit each other or the ids, and if pictures are refused.
    """
    names = picture_inputs(composite.base_model) | {TYPES, _OLD_TYPES, FEATURES}
    if others := sorted(given.keys() - names):
        known = f"It takes {', '.join(sorted(names))}" if is_composite(composite) else "It takes token ids alone"
        raise RequestError.for_field(others[0], "given", "an argument of the model's forward for pictures", f"{known}.")
    given = {name: value for name, value in given.items() if value is not None}
    has_pictures = any(pictures for _, pictures in placed) or bool(given.keys() - {TYPES, _OLD_TYPES})
    if has_pictures and (reason := getattr(composite.base_model, "_exact_pictures_refused", _NO_TOWER)):
        raise ValueError(refused_pictures(composite, reason))
    if not placed:
        return placed_inputs(composite, input_ids, real, position_ids, given)
    batch = PictureBatch(composite, input_ids)
    for run, pictures in placed:
        batch.place(run, pictures)
    return batch.features()


def refused_pictures(model: nn.Module, reason: str) -> str:
    """The text of an error for a call with pictures."""
    return (
        f"An exact {type(model).__name__} computes text alone, and was given pictures: {reason} Leave them out, or "
        "train on them with a model that is not exact."
    )


def placed_inputs(
    composite: Any, input_ids: Tensor, real: Tensor, position_ids: Tensor | None, given: dict[str, Any]
) -> PlacedFeatures | None:
    """The features of the pictures of a batch [B, T], by tensors in the form of transformers' forward.

    `real` bool [B, T]: not padding. `position_ids`: of packed rows, None for others. `given`: tensors with the names of
    `picture_inputs`, and `mm_token_type_ids`; or `HeldFeatures` alone. None if there are no pictures. Raises
    `ValueError` for tensors that do not fit each other, or the ids.
    """
    if given.get(FEATURES) is not None:
        return _held_features(composite, input_ids, given)
    types = given.get(TYPES, given.get(_OLD_TYPES))
    pixels = {name: value for name, value in given.items() if name not in (TYPES, _OLD_TYPES) and value is not None}
    _check_types(types, input_ids, has_pictures=bool(pixels))
    if not pixels:
        return None
    batch = PictureBatch(composite, input_ids)
    batch.place_in_order(sequences_of(real, position_ids), types, split_pictures(pixels))
    return batch.features()


def _held_features(composite: Any, input_ids: Tensor, given: dict[str, Any]) -> PlacedFeatures | None:
    """The features of a batch as an engine has computed them. Raises as `features_by_digest`."""
    if others := sorted(name for name, value in given.items() if name != FEATURES and value is not None):
        raise RequestError.for_field(others[0], "given", f"left out next to {FEATURES}, which stands for all pictures")
    held = given[FEATURES]
    batch = PictureBatch(composite, input_ids, features_by_digest(composite, held, input_ids))
    for run, pictures in held.placed:
        batch.place(run, pictures)
    return batch.features()


def _check_types(types: Any, input_ids: Tensor, *, has_pictures: bool) -> None:
    if types is None:
        return
    if not isinstance(types, Tensor) or types.shape != input_ids.shape:
        shape = tuple(types.shape) if isinstance(types, Tensor) else type(types).__name__
        raise ValueError(f"{TYPES} must be integers {tuple(input_ids.shape)} like input_ids, got {shape}")
    if bool((types > 1).any()):
        raise ValueError(f"{TYPES} is {int(types.max())} somewhere: videos and audio are not served, pictures (1) are.")
    if not has_pictures and bool(types.any()):
        raise ValueError(f"{TYPES} marks {int(types.sum())} tokens of pictures, and no pixel_values were given.")


def _before(
    composite: Any, inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    given = dict(zip(inspect.signature(inner.forward).parameters, args, strict=False)) | kwargs
    note_ordinary_tokens(_ordinary_tokens(composite, given.get("input_ids")))
    names = (picture_inputs(inner) | {FEATURES}) & given.keys()
    found = {name: given.pop(name) for name in names if given[name] is not None}
    if not found and not any(isinstance(given.get(name), Tensor) for name in (TYPES, _OLD_TYPES)):
        return None
    found |= {name: given.pop(name) for name in (TYPES, _OLD_TYPES) if isinstance(given.get(name), Tensor)}
    ids, mask, positions = (given.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise ValueError("An exact model that is given pictures needs input_ids [B, T], not inputs_embeds.")
    if positions is not None and positions.dim() != 2:
        raise ValueError(
            "position_ids of three axes are computed here: leave them out, or give those of the tokens alone [B, T], "
            "which restart at 0 with each packed sequence."
        )
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(f"attention_mask must be {tuple(ids.shape)} like input_ids, got {tuple(mask.shape)}")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    _state.placed = True
    place(placed_inputs(composite, ids, real, positions, found))
    return (), given


def _ordinary_tokens(composite: Any, input_ids: Any) -> OrdinaryTokens | None:
    """The ids of a call, among which those of placeholders are tokens like any other; pictures are placed later."""
    if not isinstance(input_ids, Tensor):
        return None
    names = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
    ids = [found for name in names if isinstance(found := getattr(composite.config, name, None), int)]
    return OrdinaryTokens(input_ids, torch.tensor(ids, device=input_ids.device))


def _after(inner: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    note_ordinary_tokens(None)
    if getattr(_state, "placed", False):
        _state.placed = False
        place(None)
