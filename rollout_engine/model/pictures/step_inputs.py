"""Inputs of a step that pictures add: features in the place of embeddings, and positions on three axes."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.errors import ConfigError, error_text
from rollout_engine.base.messages import ScheduledSequence, SchedulerOutput
from rollout_engine.base.pictures import PictureAttention, PlacedPicture
from rollout_engine.base.sequence_error import SequenceError
from rollout_engine.kernels.attention_params import Reach
from rollout_engine.model.modules.placed_features import layer_inputs
from rollout_engine.model.pictures.encoder import PictureEncoder
from rollout_engine.model.pictures.positions import AxisPositions, picture_positions
from rollout_engine.model.pictures.reach import reach_of_chunk


class PictureInputs(NamedTuple):
    """Features and positions of a flat batch of T tokens."""

    rows: Tensor
    """int64 [n]: the tokens whose embeddings are features."""
    features: Tensor
    """[n, H], in the text model's dtype."""
    deepstack: list[Tensor]
    """[n, H] each: added to the hidden states of these tokens behind the first layers."""
    positions: Tensor | None
    """int64 [3, T], if a sequence of the batch has positions on three axes."""
    num_encoded: int = 0
    """Pictures that were encoded for it."""
    reach: Reach | None = None
    """How far the T tokens see past their own position; None: no farther."""


def module_inputs(
    text: Any, token_ids: Tensor, positions: Tensor, pictures: PictureInputs
) -> dict[str, Tensor | list[Tensor]]:
    """Arguments of a causal LM's forward for a flat batch with pictures, in place of its `input_ids`.

    `token_ids`, `positions`: int64 [T] each. Positions on three axes follow those of the tokens, as [4, 1, T].
    """
    axes = positions[None] if pictures.positions is None else torch.cat([positions[None], pictures.positions])[:, None]
    if not len(pictures.rows):
        return {"input_ids": token_ids[None], "position_ids": axes}
    ids = token_ids.index_fill(0, pictures.rows, 0)  # the placeholder's id may be beyond the vocabulary
    embeddings = text.get_input_embeddings()(ids[None])
    embeddings[0, pictures.rows] = pictures.features
    is_feature = torch.zeros(ids.shape, dtype=torch.bool).index_fill_(0, pictures.rows, True)
    found: dict[str, Tensor | list[Tensor]] = {"inputs_embeds": embeddings, "position_ids": axes}
    found |= layer_inputs(text.base_model, ids[None], is_feature[None])
    if pictures.deepstack:
        found |= {"visual_pos_masks": is_feature[None], "deepstack_visual_embeds": pictures.deepstack}
    return found


class SequencePictures(NamedTuple):
    """The pictures of one sequence."""

    placed: Sequence[PlacedPicture]
    places: list[np.ndarray]
    """int64: of each picture, the positions of its features, ascending."""
    positions: AxisPositions | None
    adapter_slot: int = -1
    """Slot of the sequence's adapter; -1: it has none."""

    @classmethod
    def of(
        cls,
        encoder: PictureEncoder,
        token_ids: Sequence[int],
        placed: Sequence[PlacedPicture],
        image_token_id: int,
        adapter_slot: int = -1,
    ) -> "SequencePictures":
        """Find the places of features in a prompt of these tokens."""
        ids = np.asarray(token_ids, np.int64)
        places = [each.start + np.flatnonzero(ids[each.start : each.end] == image_token_id) for each in placed]
        return cls(placed, places, picture_positions(encoder.tower, placed), adapter_slot)


class SequencesWithPictures:
    """The live sequences that have pictures, by id.

    Args:
        encoder: encodes their pictures.
        image_token_id: the id of placeholder tokens.
        attention: which layers let a token of a picture see the whole picture.
    """

    def __init__(self, encoder: PictureEncoder, image_token_id: int, attention: PictureAttention = "causal") -> None:
        self.encoder, self.image_token_id, self.attention = encoder, image_token_id, attention
        self._of: dict[int, SequencePictures | Exception] = {}
        """An exception: the sequence cannot be computed."""

    def update(self, work: SchedulerOutput) -> None:
        """Forget finished sequences, and note new ones with pictures."""
        for sequence_id in work.finished_sequence_ids if self._of else ():
            self._of.pop(sequence_id, None)
        for new in work.new:
            if new.pictures:
                given = new.token_ids, new.pictures, self.image_token_id, new.adapter_slot
                try:
                    self._of[new.sequence_id] = SequencePictures.of(self.encoder, *given)
                except Exception as problem:  # raised in the step that computes it
                    self._of[new.sequence_id] = problem

    def inputs(self, scheduled: Sequence[ScheduledSequence], starts: np.ndarray) -> PictureInputs | None:
        """The inputs that pictures add to a step; `starts`: int64 [N + 1], the first tokens of its chunks.

        None if they add nothing. Raises `SequenceError` for a sequence whose pictures cannot be computed.
        """
        if not self._of or not any(chunk.sequence_id in self._of for chunk in scheduled):
            return None
        chunks = [
            ChunkPictures(
                self._require(chunk.sequence_id), chunk.num_computed_tokens, int(end - start), chunk.sequence_id
            )
            for chunk, start, end in zip(scheduled, starts[:-1], starts[1:], strict=True)
        ]
        return inputs_of(chunks, self.encoder, self.attention)

    def reset(self) -> None:
        """Forget the features of all pictures."""
        self.encoder.reset()

    def _require(self, sequence_id: int) -> SequencePictures | None:
        found = self._of.get(sequence_id)
        if isinstance(found, Exception):
            raise _sequence_error(sequence_id, found) from found
        return found


class ChunkPictures(NamedTuple):
    """Tokens [first, first + size) of a sequence, and its pictures, if it has some."""

    pictures: SequencePictures | None
    first: int
    size: int
    sequence_id: int = -1
    """-1: no sequence of an engine's step."""


def inputs_of(
    chunks: Sequence[ChunkPictures], encoder: PictureEncoder, attention: PictureAttention = "causal"
) -> PictureInputs | None:
    """The inputs that pictures add to the chunks of a flat batch, end to end; None if they add nothing.

    `attention`: which layers let a token of a picture see the whole picture, which a chunk then must not split.
    """
    num_before = encoder.num_encoded
    found = list(_features_of(chunks, encoder))
    positions, num_encoded = _positions_of(chunks), encoder.num_encoded - num_before
    if not found:
        nothing = torch.empty(0)
        return None if positions is None else PictureInputs(torch.empty(0, dtype=torch.int64), nothing, [], positions)
    rows, features, deepstack = zip(*found, strict=True)
    layers = [torch.cat(parts) for parts in zip(*deepstack, strict=True)]
    places, reach = torch.from_numpy(np.concatenate(rows)), _reach_of(chunks, attention)
    return PictureInputs(places, torch.cat(features), layers, positions, num_encoded, reach)


def _features_of(
    chunks: Sequence[ChunkPictures], encoder: PictureEncoder
) -> Iterable[tuple[np.ndarray, Tensor, list[Tensor]]]:
    """(rows of the flat batch, their features, those of deeper layers) of each picture that a chunk overlaps."""
    start = 0
    for chunk in chunks:
        try:
            yield from list(_features_of_chunk(chunk, start, encoder))
        except Exception as problem:
            if chunk.sequence_id < 0:
                raise
            raise _sequence_error(chunk.sequence_id, problem) from problem
        start += chunk.size


def _features_of_chunk(
    chunk: ChunkPictures, start: int, encoder: PictureEncoder
) -> Iterable[tuple[np.ndarray, Tensor, list[Tensor]]]:
    pictures, first, size, _ = chunk
    adapter_slot = -1 if pictures is None else pictures.adapter_slot
    for each, places in zip(pictures.placed, pictures.places, strict=True) if pictures is not None else ():
        low, high = np.searchsorted(places, [first, first + size]).tolist()
        if low < high:
            features = encoder.features(each.picture, adapter_slot)
            if len(features.rows) != len(places):
                raise ConfigError(
                    f"A picture has {len(features.rows)} features, and its prompt {len(places)} placeholders for "
                    "them: expand prompts with the checkpoint's own processor."
                )
            deepstack = [layer[low:high] for layer in features.deepstack]
            yield start + places[low:high] - first, features.rows[low:high], deepstack


def _reach_of(chunks: Sequence[ChunkPictures], attention: PictureAttention) -> Reach | None:
    if attention == "causal":
        return None
    of_chunks = [
        reach_of_chunk(() if chunk.pictures is None else chunk.pictures.places, chunk.first, chunk.size)
        for chunk in chunks
    ]
    return Reach(torch.from_numpy(np.concatenate(of_chunks)), in_windows_alone=attention == "windows")


def _sequence_error(sequence_id: int, problem: Exception) -> SequenceError:
    what = f"its pictures cannot be computed ({error_text(problem).rstrip('.')})"
    return SequenceError(sequence_id, f"{what}; arrays and placeholders must be those of the checkpoint's processor")


def _positions_of(chunks: Sequence[ChunkPictures]) -> Tensor | None:
    """int64 [3, T]; None if every sequence of the batch counts its tokens one by one."""
    axes = [None if chunk.pictures is None else chunk.pictures.positions for chunk in chunks]
    if not any(axes):
        return None
    sizes = [chunk.size for chunk in chunks]
    starts = np.cumsum([0, *sizes])
    behind = [chunk.first + (0 if each is None else each.delta) for chunk, each in zip(chunks, axes, strict=True)]
    counted = np.arange(starts[-1]) + np.repeat(np.array(behind) - starts[:-1], sizes)
    positions = torch.from_numpy(counted).repeat(3, 1)
    for (_, first, size, _), each, start in zip(chunks, axes, starts.tolist(), strict=False):
        if each is not None and first < each.first.shape[1]:
            positions[:, start : start + size] = each.between(first, first + size)
    return positions
