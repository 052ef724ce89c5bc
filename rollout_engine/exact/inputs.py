"""`inputs`: the pictures of a rollout, in the form that transformers' forward takes them."""

from typing import Any

import torch
from torch import Tensor

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import EncodedPicture, PlacedPicture, join_arrays
from rollout_engine.model.training.engine_features import FEATURES, HeldFeatures
from rollout_engine.model.training.rollout_inputs import PICTURES, check_rows, pictures_of


def inputs(batch: Any, *, features: bool = False) -> dict[str, Any]:
    """The pictures of a rollout as tensors, by names of arguments of transformers' forward; {} if there are none.

    `exact.token_logprobs(model, ids, mask, **exact.inputs(batch))` takes them, and so do `model(input_ids=..., ...)`
    and transformers' own models: `pixel_values`, and by the kind of model `image_grid_thw`, `image_sizes` or others,
    with the pictures of all rows in order; smaller ones are padded with zeros to the largest. `mm_token_type_ids`
    int64, shaped as batch["tokens", "full"], is 1 at the tokens that stand for a picture's features.

    Args:
        batch: the result of `RolloutPolicy.rollout`, padded or packed, or a part of it.
        features: return {"picture_features": ...} instead, which exact models take, and no others: the features that
            `RolloutPolicy.add_picture_features(batch)` has fetched. They have the bits of the model's own tower and
            projector, which encode nothing then, so these must be frozen, and have the weights that the engine had.

    Raises `RequestError` for anything but a rollout, and with `features` if they were not fetched.
    """
    if not hasattr(batch, "keys"):
        raise RequestError.for_field("batch", batch, "a TensorDict as RolloutPolicy.rollout returns it")
    if PICTURES not in batch.keys():
        return {}
    ids = check_rows(batch["tokens", "full"])
    sequences = pictures_of(batch)
    if not any(placed for _, placed in sequences):
        return {}
    if features:
        return {FEATURES: HeldFeatures(tuple(ids.shape), sequences, _features_of(batch, sequences))}
    types = torch.zeros_like(ids)
    for sequence, placed in sequences:
        tokens = ids[sequence.row, sequence.columns]
        for each in placed:
            _mark(types, tokens, sequence.row, sequence.columns, each)
    joined = join_arrays([each for _, placed in sequences for each in placed])
    return {name: torch.from_numpy(array) for name, array in joined.items()} | {"mm_token_type_ids": types}


def _features_of(batch: Any, sequences: list[Any]) -> list[EncodedPicture]:
    """The features of all pictures of a rollout."""
    rows = batch.get(FEATURES).tolist() if FEATURES in batch.keys() else []
    found = [each for row in rows for each in row]
    missing = {each.picture.digest for _, placed in sequences for each in placed} - {each.digest for each in found}
    if missing:
        hint = "Call policy.add_picture_features(batch) while the engine has the trainer's tower."
        shown = f"without features of {len(missing)} pictures"
        raise RequestError.for_field("features=True: batch", shown, "with those of all its pictures", hint)
    return found


def _mark(types: Tensor, tokens: Tensor, row: int, columns: Tensor, placed: PlacedPicture) -> None:
    span = slice(placed.start, placed.end)
    types[row, columns[span][tokens[span] == tokens[placed.start]]] = 1
