"""Pictures of prompts, as arrays that a model's vision tower reads, and their places among the tokens."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

import msgspec
import numpy as np

from rollout_engine.base.errors import RequestError

PictureAttention = Literal["causal", "all", "windows"]
"""Which layers let a token of a picture see the whole picture: none, all of them, or those with a sliding window."""


class Picture(msgspec.Struct, frozen=True, eq=False):
    """One picture of a prompt, as the checkpoint's image processor has made it."""

    digest: bytes
    """16 bytes, blake2b over the names, dtypes, shapes and bytes of `arrays`."""
    arrays: dict[str, np.ndarray]
    """The image processor's outputs for this picture alone, by the names of arguments of transformers' forward and in
    their shapes: {"pixel_values": [N, D], "image_grid_thw": [1, 3]} (Qwen), {"pixel_values": [1, 3, H, W],
    "image_sizes": [1, 2]} (Pixtral). Contiguous, not to be changed."""

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> "Picture":
        """Make a picture of arrays by their names, and compute its digest."""
        held = {name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}
        state = blake2b(digest_size=16)
        for name, array in held.items():
            state.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            state.update(array.reshape(-1).view(np.uint8).data)
        return cls(state.digest(), held)

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def __repr__(self) -> str:
        """Digest and shapes, without the arrays' contents."""
        return f"Picture({self.digest.hex()}: {self._shapes})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """The same for terminals that format values by rich."""
        return [("digest", self.digest.hex()), ("arrays", self._shapes)]

    @property
    def _shapes(self) -> str:
        shapes = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in self.arrays.items())
        return shapes or "its digest alone"


class PlacedPicture(msgspec.Struct, frozen=True, eq=False):
    """A picture and its place in a prompt.

    Its features stand, in order, at the positions of the span whose token is `PictureInfo.image_token_id`. The other
    tokens of the span, such as row breaks, are ordinary ones, and so are placeholder ids outside of every span.
    """

    start: int
    """Position of its first placeholder token."""
    end: int
    """Position behind its last placeholder token."""
    picture: Picture


class PictureInfo(msgspec.Struct, frozen=True):
    """How a model takes pictures."""

    image_token_id: int
    """Id of the placeholder tokens that stand for a picture's features."""
    unsupported_reason: str = ""
    """Why pictures are refused, though the checkpoint has a vision tower, as a sentence; "": they are served."""
    attention: PictureAttention = "causal"
    """Which layers let a token of a picture see the whole picture; then no step computes a part of one."""


def end_between_pictures(placed: Sequence[PlacedPicture], start: int, end: int) -> int:
    """The end of a chunk of tokens from `start`, which is inside no picture, up to `end`, that splits none of them.

    It is beyond `end` if the chunk begins with a picture that ends there.
    """
    for each in placed:
        if each.start < end < each.end:
            return each.start if each.start > start else each.end
    return end


def start_between_pictures(placed: Sequence[PlacedPicture], position: int) -> int:
    """`position`, or the start of the picture that it is inside of."""
    return next((each.start for each in placed if each.start < position < each.end), position)


def shift_pictures(pictures: Sequence[PlacedPicture], offset: int) -> list[PlacedPicture]:
    """The same pictures, `offset` positions later."""
    return [PlacedPicture(each.start + offset, each.end + offset, each.picture) for each in pictures]


def join_arrays(pictures: Sequence[PlacedPicture]) -> dict[str, np.ndarray]:
    """The arrays of pictures in order as one batch, in the form of transformers' forward; {} if there are none.

    Arrays [n, ...] of a name are end to end, padded with zeros to the largest in every other dimension.
    """
    found = [each.picture.arrays for each in pictures]
    return {name: _end_to_end([each[name] for each in found]) for name in found[0]} if found else {}


def _end_to_end(arrays: Sequence[np.ndarray]) -> np.ndarray:
    shape = np.max([each.shape[1:] for each in arrays], axis=0, initial=0).tolist()
    result = np.zeros((sum(map(len, arrays)), *shape), dtype=arrays[0].dtype)
    first = 0
    for each in arrays:
        result[(slice(first, first + len(each)), *(slice(0, size) for size in each.shape[1:]))] = each
        first += len(each)
    return result


class SharedPictures(msgspec.Struct, frozen=True, eq=False):
    """Pictures of several sequences, to be sent: each different one once, without its digest."""

    arrays: list[dict[str, np.ndarray]]
    """The arrays of each picture."""
    places: list[list[tuple[int, int, int]]]
    """Start and end of each span of a sequence, and the index of its picture."""

    @classmethod
    def of(cls, placed: Sequence[Sequence[PlacedPicture]]) -> "SharedPictures":
        """Collect the pictures of sequences. Raises `RequestError` for anything else."""
        for row in placed:
            if not isinstance(row, list | tuple) or not all(isinstance(each, PlacedPicture) for each in row):
                bound = "for each sequence a list of PlacedPicture, as RequestOutput.pictures"
                raise RequestError.for_field("pictures", f"a list with {type(row).__name__}", bound)
        pictures = {each.picture.digest: each.picture for row in placed for each in row}
        index = {digest: i for i, digest in enumerate(pictures)}
        places = [[(each.start, each.end, index[each.picture.digest]) for each in row] for row in placed]
        return cls([each.arrays for each in pictures.values()], places)

    def place_all(self) -> list[list[PlacedPicture]]:
        """The pictures of each sequence, with digests that were computed here."""
        pictures = [Picture.of(arrays) for arrays in self.arrays]
        return [[PlacedPicture(start, end, pictures[index]) for start, end, index in row] for row in self.places]


class EncodedPictures(msgspec.Struct, frozen=True, eq=False):
    """Features of pictures, as an engine's vision tower and projector compute them, under one version of these."""

    tower: str
    """Digest of the weights of tower and projector (`model.pictures.tower_digest`)."""
    dtype: str
    """The engine's: "float32", "bfloat16" or "float16"."""
    rows: list[np.ndarray]
    """For each picture [n, H] of `dtype`, bfloat16 as its bits in int16; [0, 0]: the engine does not hold it."""
    deepstack: list[list[np.ndarray]]
    """For each picture, the same for the first layers of the text model; empty in most models."""


class EncodedPicture(msgspec.Struct, frozen=True, eq=False):
    """The features of one picture of a rollout, and the version of the tower that computed them."""

    digest: bytes
    """That of its `Picture`."""
    tower: str
    """Digest of the weights of tower and projector, as `EncodedPictures.tower`."""
    dtype: str
    rows: np.ndarray
    """[n, H], as an entry of `EncodedPictures.rows`."""
    deepstack: list[np.ndarray]
    """[n, H] each, as an entry of `EncodedPictures.deepstack`."""

    def __repr__(self) -> str:
        """Digest and sizes, without the features."""
        return f"EncodedPicture({self.digest.hex()}: {self.dtype}{list(self.rows.shape)})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """The same for terminals that format values by rich."""
        return [("digest", self.digest.hex()), ("rows", f"{self.dtype}{list(self.rows.shape)}")]
