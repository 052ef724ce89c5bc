"""Features of pictures that an engine has computed, in a trainer's call: checked against the trainer's own tower.

    inputs(batch, features=True) ──> HeldFeatures ──> features_by_digest: same weights, none of them trained

They have the bits that the trainer's tower would give, so only the work of encoding is left out.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.base.pictures import EncodedPicture, PlacedPicture
from rollout_engine.model.pictures.feature_arrays import from_arrays
from rollout_engine.model.pictures.tower_digest import tower_digest
from rollout_engine.model.pictures.tower_forward import PictureFeatures, loose_parameters, picture_parts
from rollout_engine.model.training.adapted_layers import active_adapters
from rollout_engine.model.training.batch_pictures import TokenRun, require_whole_tower

FEATURES = "picture_features"
"""Key of a rollout with the features of each sequence's pictures, a tuple of `EncodedPicture`; and the name of the
argument that `HeldFeatures` are."""
_ADVICE = (
    "Push the trainer's weights (update_weights) before policy.add_picture_features(batch), or leave features=True "
    "out: the model's own tower then encodes the pictures."
)


class HeldFeatures(NamedTuple):
    """The pictures of a batch of token ids at their places, and their features as an engine has computed them."""

    shape: tuple[int, ...]
    """Shape of the ids."""
    placed: list[tuple[TokenRun, Sequence[PlacedPicture]]]
    encoded: list[EncodedPicture]
    """Those of each picture, in any order; several of one picture are equal."""


def features_by_digest(composite: Any, held: Any, input_ids: Tensor) -> dict[bytes, PictureFeatures]:
    """The features of each picture of a batch, as the tower of `composite` would compute them.

    Raises `RequestError` for anything but the result of `exact.inputs` for these ids, and `ConfigError` if the model's
    tower is trained, has an active adapter, or has other weights than the engine had.
    """
    if not isinstance(held, HeldFeatures):
        raise RequestError.for_field(FEATURES, held, "the result of exact.inputs(batch, features=True)")
    if held.shape != tuple(input_ids.shape):
        bound = f"of token ids of shape {list(held.shape)}, as they were made for"
        raise RequestError.for_field(FEATURES, f"for {list(input_ids.shape)}", bound)
    require_whole_tower(composite)
    _require_fixed_tower(composite)
    ours = tower_digest(composite)
    parameter = next(each for part in picture_parts(composite) for each in part.parameters())
    dtype = str(parameter.dtype).removeprefix("torch.")
    for each in held.encoded:  # of one picture there may be two, from rollouts that were joined
        if (each.tower, each.dtype) != (ours, dtype):
            theirs = f"{each.dtype}, digest {each.tower}"
            raise ConfigError(
                f"The engine's features of picture {each.digest.hex()} are of another vision tower ({theirs}) than "
                f"this model's ({dtype}, digest {ours}). {_ADVICE}"
            )
    different = {each.digest: each for each in held.encoded}
    return {digest: from_arrays(each, input_ids.device) for digest, each in different.items()}


def _require_fixed_tower(composite: Any) -> None:
    """Raise `ConfigError` if features of an engine lack gradients, or an adapter, that the model's own would have."""
    own = [pair for part in picture_parts(composite) for pair in part.named_parameters()]
    own += loose_parameters(composite).items()
    trained = next((name for name, each in own if each.requires_grad), None)
    if trained is not None and torch.is_grad_enabled():
        raise ConfigError(
            f"features=True is for a frozen vision tower and projector, and '{trained}' requires a gradient, which "
            "it would not get. Freeze them (requires_grad_(False)), or leave features=True out."
        )
    for part in picture_parts(composite):
        if names := active_adapters(part) - {None}:
            raise ConfigError(
                f"features=True: an engine's features are those without an adapter, and the vision tower has "
                f"{', '.join(sorted(map(repr, names)))}. Leave features=True out."
            )
