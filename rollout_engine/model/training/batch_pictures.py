"""Pictures in a trainer's batch: taken apart as transformers has them, encoded one by one, placed among the tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.pictures import Picture, PictureAttention, PlacedPicture
from rollout_engine.kernels.attention_params import Reach
from rollout_engine.kernels.cpu.arguments import argument_error
from rollout_engine.model.modules.packed_rows import starts_of
from rollout_engine.model.modules.placed_features import PlacedFeatures
from rollout_engine.model.pictures.positions import picture_positions
from rollout_engine.model.pictures.reach import reach_of
from rollout_engine.model.pictures.tower_forward import PictureFeatures, encode_picture, picture_parts

ATTENTION = "_exact_picture_attention"
"""Attribute of a composite's base model: which layers let a token of a picture see the whole picture."""


class TokenRun(NamedTuple):
    """The real tokens of one sequence of a batch [B, T]."""

    row: int
    columns: Tensor
    """int64 [number of tokens]."""

    def __str__(self) -> str:
        first, last = int(self.columns[0]), int(self.columns[-1])
        return f"row {self.row}, tokens {first} to {last}"


def sequences_of(real: Tensor, position_ids: Tensor | None = None) -> list[TokenRun]:
    """The sequences of a batch whose real tokens are by `real` bool [B, T], in order; one a row, or by their positions.

    `position_ids` int64 [B, T]: of packed rows.
    """
    starts = torch.zeros_like(real) if position_ids is None else starts_of(position_ids.expand(real.shape))
    found = []
    for row, (is_real, is_start) in enumerate(zip(real, starts, strict=True)):
        columns = is_real.nonzero()[:, 0]
        cuts = is_start[columns].nonzero()[:, 0].tolist()
        edges = [0, *(cut for cut in cuts if cut), len(columns)]
        found += [TokenRun(row, columns[a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True) if b > a]
    return found


def split_pictures(inputs: Mapping[str, Tensor]) -> list[Picture]:
    """The pictures, or tiles of pictures, that tensors in the form of transformers' forward hold, in order.

    By `image_grid_thw` [n, 3] the rows of `pixel_values` are divided; any other tensor has one entry a picture, whose
    padding to the largest one is left out. Raises `ValueError` for tensors that do not fit each other.
    """
    arrays = {name: _array(name, value) for name, value in inputs.items()}
    if "pixel_values" not in arrays:
        raise ValueError(f"{', '.join(sorted(arrays))} without pixel_values: give all that the processor returned.")
    grids = arrays.get("image_grid_thw")
    if grids is not None:
        return _split_by_grids(arrays, grids)
    num = len(arrays["pixel_values"])
    for name, array in arrays.items():
        if len(array) != num:
            raise ValueError(f"{name} is {list(array.shape)}, and pixel_values has {num} entries: one each is needed.")
    entries = [_without_padding({name: array[i : i + 1] for name, array in arrays.items()}) for i in range(num)]
    return [Picture.of(each) for each in entries if each["pixel_values"].size]


def require_whole_tower(composite: Any) -> None:
    """Raise `ConfigError` if weights of the vision tower are sharded over processes, and not gathered now.

    A picture is encoded on its own: processes with different numbers of pictures would wait for each other's shards.
    """
    linears = (child for part in picture_parts(composite) for child in part.modules() if isinstance(child, nn.Linear))
    for child in linears:
        weight = child.weight
        if hasattr(weight, "full_tensor") or weight.dim() != 2 or not weight.untyped_storage().size():  # FSDP2, FSDP1
            raise ConfigError(
                f"The vision tower of {type(composite).__name__} is sharded (FSDP), and pictures are encoded before "
                "its weights are gathered. Call the wrapped model itself, model(input_ids=..., **exact.inputs(batch)), "
                "with the tower in the outermost group (shard the layers of the text alone), or train without sharding."
            )


class PictureBatch:
    """Places pictures in a batch of token ids, and encodes each different one once."""

    def __init__(
        self, composite: Any, input_ids: Tensor, encoded: Mapping[bytes, PictureFeatures] | None = None
    ) -> None:
        """`encoded`: features of all pictures by their digests; None: the composite's tower encodes them.

        Raises `ConfigError` for a tower whose weights are sharded now.
        """
        require_whole_tower(composite)
        self._composite, self._encoded = composite, encoded
        self._ids = input_ids
        self._token = int(self._composite.config.image_token_id)
        self._features: list[PictureFeatures] = []
        self._rows: dict[bytes, tuple[int, int]] = {}
        self._num_rows = 0
        self._index = torch.full_like(input_ids, -1)
        self._reach = torch.zeros_like(input_ids, dtype=torch.int32)
        self._attention: PictureAttention = getattr(composite.base_model, ATTENTION, "causal")
        self._placed: list[tuple[TokenRun, list[PlacedPicture]]] = []

    def place(self, sequence: TokenRun, pictures: Sequence[PlacedPicture]) -> None:
        """Put the pictures of one sequence at their spans, whose positions count its tokens.

        Raises `ValueError` for spans that do not have as many placeholders as their picture has features.
        """
        ids = self._ids[sequence.row, sequence.columns]
        for number, each in enumerate(pictures):
            at = (ids[each.start : each.end] == self._token).nonzero()[:, 0] + each.start
            _, size = self._encode(each.picture)
            if len(at) != size:
                raise ValueError(
                    f"{sequence}: picture {number} has {size} features, and its span [{each.start}, {each.end}) has "
                    f"{len(at)} placeholder tokens (id {self._token}). Give the token ids that the rollout has."
                )
            self._put(sequence, at, each.picture)
        self._placed.append((sequence, list(pictures)))

    def place_in_order(self, sequences: Sequence[TokenRun], types: Tensor | None, pictures: Sequence[Picture]) -> None:
        """Put pictures, or tiles, one after the other at the placeholders of sequences.

        `types` [B, T]: 1 at tokens that stand for a picture (`mm_token_type_ids`); None: at all placeholder ids.
        Raises `ValueError` if their features do not end with those of a sequence.
        """
        left = list(pictures)
        for sequence in sequences:
            at = (self._ids[sequence.row, sequence.columns] == self._token).nonzero()[:, 0]
            if types is not None:
                at = at[types[sequence.row, sequence.columns[at]] == 1]
            placed, first = [], 0
            while first < len(at):
                _, size = self._encode(left[0]) if left else (0, 0)
                if not 0 < size <= len(at) - first:
                    raise ValueError(self._misfit(sequence, len(at), first, size, len(pictures) - len(left)))
                own = at[first : first + size]
                placed.append(PlacedPicture(int(own[0]), int(own[-1]) + 1, left[0]))
                self._put(sequence, own, left.pop(0))
                first += size
            self._placed.append((sequence, placed))
        if left:
            raise ValueError(
                f"{len(pictures)} pictures (or tiles) were given, and the placeholder tokens (id {self._token}) of all "
                f"rows end behind {len(pictures) - len(left)} of them. mm_token_type_ids must be 1 at each."
            )

    def features(self) -> PlacedFeatures | None:
        """Those of all that was placed; None if there is none."""
        if not self._features:
            return None
        deepstack = zip(*(each.deepstack for each in self._features), strict=True)
        return PlacedFeatures(
            rows=torch.cat([each.rows for each in self._features]),
            deepstack=tuple(torch.cat(layer) for layer in deepstack),
            row_of=self._index,
            positions=self._positions(),
            reach=None if self._attention == "causal" else Reach(self._reach, self._attention == "windows"),
        )

    def _encode(self, picture: Picture) -> tuple[int, int]:
        """The first row and the number of the features of a picture."""
        if picture.digest not in self._rows:
            found = self._encode_anew(picture) if self._encoded is None else self._encoded[picture.digest]
            self._rows[picture.digest] = self._num_rows, len(found.rows)
            self._features.append(found)
            self._num_rows += len(found.rows)
        return self._rows[picture.digest]

    def _encode_anew(self, picture: Picture) -> PictureFeatures:
        device = self._ids.device
        arrays = {name: torch.from_numpy(np.array(each)).to(device) for name, each in picture.arrays.items()}
        return _encode_without_chance(self._composite, arrays)

    def _put(self, sequence: TokenRun, at: Tensor, picture: Picture) -> None:
        first, size = self._encode(picture)
        rows = torch.arange(first, first + size, device=self._index.device)
        before = int(at[0]) - 1
        if self._attention != "causal" and before >= 0 and self._index[sequence.row, sequence.columns[before]] >= 0:
            raise ValueError(
                f"{sequence}: a picture begins at its token {before + 1}, right behind another one, and this model "
                "takes both for one picture: put a token between them, as its processor does."
            )
        self._index[sequence.row, sequence.columns[at]] = rows
        self._reach[sequence.row, sequence.columns[at]] = torch.from_numpy(reach_of(at.numpy()))

    def _positions(self) -> Tensor | None:
        """Rotary positions int64 [3, B, T]; None if the model has one axis."""
        result = None
        for sequence, pictures in self._placed:
            size = len(sequence.columns)
            own = torch.arange(size).expand(3, -1)
            if pictures:
                axes = picture_positions(self._composite, pictures)
                if axes is None:
                    return None
                own = axes.between(0, size)
            if result is None:
                result = torch.zeros(3, *self._ids.shape, dtype=torch.int64, device=self._ids.device)
            result[:, sequence.row, sequence.columns] = own.to(result.device)
        return result

    def _misfit(self, sequence: TokenRun, num: int, first: int, size: int, number: int) -> str:
        given = f"{num} placeholder tokens (id {self._token})"
        if not size:
            return (
                f"{sequence}: it has {given}, and the pictures end behind {first} of them. If such ids were sampled, "
                "give mm_token_type_ids, which is 1 at a picture's tokens alone, as exact.inputs(batch) does."
            )
        return (
            f"{sequence}: it has {given}, of which pictures before number {number} take {first}, and this one has "
            f"{size} features. Pictures must be in the order of rows, and mm_token_type_ids 1 at their tokens alone."
        )


def _encode_without_chance(composite: nn.Module, arrays: dict[str, Tensor]) -> PictureFeatures:
    """The features of one picture. Raises `ConfigError` if random numbers were drawn for them."""
    before = torch.get_rng_state()
    found = encode_picture(composite, arrays)
    if not torch.equal(before, torch.get_rng_state()):
        raise ConfigError(
            f"The vision tower of {type(composite).__name__} drew random numbers (dropout, perhaps), and no engine "
            "does. Load the model with its dropout set to 0.0, or call model.eval()."
        )
    return found


def _split_by_grids(arrays: dict[str, np.ndarray], grids: np.ndarray) -> list[Picture]:
    pixels = arrays["pixel_values"]
    sizes = grids.prod(1) if grids.ndim == 2 else np.zeros(0, dtype=np.int64)
    if not len(sizes) or sizes.sum() != len(pixels):
        raise ValueError(
            f"image_grid_thw {list(grids.shape)} describes pictures of {int(sizes.sum())} patches, and pixel_values "
            f"has {len(pixels)}: give both as the processor returned them."
        )
    others = {name: array for name, array in arrays.items() if name != "pixel_values"}
    for name, array in others.items():
        if len(array) != len(grids):
            raise ValueError(f"{name} is {list(array.shape)}, and image_grid_thw has {len(grids)} pictures.")
    ends = sizes.cumsum().tolist()
    return [
        Picture.of({"pixel_values": pixels[a:b]} | {name: array[i : i + 1] for name, array in others.items()})
        for i, (a, b) in enumerate(zip([0, *ends], ends, strict=False))
    ]


def _without_padding(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One entry of a batch, without the padding that larger pictures in the batch gave it."""
    pixels = arrays["pixel_values"]
    if pixels.ndim == 4 and "image_sizes" in arrays:  # [1, C, H, W]
        height, width = arrays["image_sizes"][0].tolist()
        return arrays | {"pixel_values": pixels[:, :, :height, :width]}
    if pixels.ndim == 5:  # [1, tiles, C, H, W]: tiles of zeros alone are padding
        is_tile = pixels[0].reshape(pixels.shape[1], -1).any(1)
        return {
            name: array[:, is_tile] if array.shape[:2] == pixels.shape[:2] else array for name, array in arrays.items()
        }
    return arrays


def _array(name: str, value: Any) -> np.ndarray:
    if not isinstance(value, Tensor) or not value.dim() or value.is_meta:
        raise argument_error(name, value, "a tensor as the model's processor returns it")
    if value.requires_grad:
        raise ValueError(f"{name} requires a gradient, and an exact model computes none of pixels.")
    value = value.detach().cpu()
    return np.ascontiguousarray((value.float() if value.is_floating_point() else value).numpy())
