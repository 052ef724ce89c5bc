"""Features of the pictures of whole sequences, for an engine that scores them as a trainer does."""

from collections.abc import Sequence

import torch

from rollout_engine.base.pictures import PlacedPicture
from rollout_engine.model.modules.placed_features import PlacedFeatures
from rollout_engine.model.pictures.step_inputs import (
    ChunkPictures,
    SequencePictures,
    SequencesWithPictures,
    inputs_of,
)


def features_of_rows(
    pictures: SequencesWithPictures,
    rows: Sequence[Sequence[int]],
    placed: Sequence[Sequence[PlacedPicture]],
    length: int,
    adapter_slot: int = -1,
) -> PlacedFeatures | None:
    """The features of a batch [B, length], whose rows are padded on the right; None if there are none.

    `placed`: the pictures of each row. `adapter_slot`: that of the adapter that all rows are under; -1: none. Raises
    `ConfigError` for pictures that do not fit their spans.
    """
    chunks = []
    for ids, own in zip(rows, placed, strict=True):
        given = ids, own, pictures.image_token_id, adapter_slot
        held = SequencePictures.of(pictures.encoder, *given) if own else None
        chunks += [ChunkPictures(held, 0, len(ids)), ChunkPictures(None, 0, length - len(ids))]
    found = inputs_of(chunks, pictures.encoder, pictures.attention)
    if found is None:
        return None
    index = torch.full((len(rows) * length,), -1)
    index[found.rows] = torch.arange(len(found.rows))
    positions = None if found.positions is None else found.positions.view(3, len(rows), length)
    reach = found.reach and found.reach._replace(tokens=found.reach.tokens.view(len(rows), length))
    return PlacedFeatures(found.features, tuple(found.deepstack), index.view(len(rows), length), positions, reach)
