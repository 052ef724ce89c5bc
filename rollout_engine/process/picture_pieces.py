"""Pictures of requests between a client and a core, each sent once: both ends in one file.

    client   AddRequest with pictures ── SentPictures ──> PicturePiece ... of those that the core lacks
                                                          AddRequest with digests alone
    core     PictureIntake, on the socket's thread: ──> AddRequest with pictures, for the busy loop

A piece is small enough to be sent as it is, and is copied once, into its array. The core computes the digest of the
arrays that have arrived: a client cannot give one picture the digest of another. `ForgetPictures` empties both ends of
a client's cache: the core asks for it, and the client answers in the order of its own messages, so that both do it at
the same one.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from rollout_engine.base.metrics import PictureStats
from rollout_engine.base.picture_cache import ReceivedPictures, SentPictures
from rollout_engine.base.pictures import Picture
from rollout_engine.children.failure import WireError
from rollout_engine.process.parts import PART_BYTES
from rollout_engine.process.wire import (
    AddRequest,
    ArrayForm,
    ForgetPictures,
    Limits,
    MessageTooLongError,
    PicturePiece,
)

MAX_PICTURE_BYTES = 1 << 30
"""Bytes of one picture at most."""
MAX_REQUEST_BYTES = 4 << 30
"""Bytes of all pictures of one request at most."""
_PIECE_BYTES = PART_BYTES - (1 << 15)
"""Most bytes of a piece, so that its struct fits in the same multipart."""
_MAX_ARRAYS, _MAX_ARRIVED = 64, 4096
"""Arrays of one picture at most, and pictures that arrive before their request."""
_DTYPES = {dtype.str: dtype for dtype in map(np.dtype, "? u1 i1 <i2 <i4 <i8 <f2 <f4 <f8".split())}


def in_order(message: AddRequest, sent: SentPictures, limits: Limits) -> Iterator[PicturePiece | AddRequest]:
    """Yield pieces of the pictures of a request that the core lacks, and then the request, without their arrays.

    Raises `MessageTooLongError` and `TypeError` for pictures that cannot be sent; then both ends have to forget theirs.
    """
    request = message.request
    placed, missing = sent.strip(request.pictures)
    if (total := sum(picture.num_bytes for picture in missing)) > MAX_REQUEST_BYTES:
        raise MessageTooLongError(f"its pictures take {total} bytes, and may take {MAX_REQUEST_BYTES}; give fewer")
    for picture in missing:
        yield from _pieces_of(picture, min(_PIECE_BYTES, limits.message_bytes // 2))
    yield msgspec.structs.replace(message, request=msgspec.structs.replace(request, pictures=placed))


def _pieces_of(picture: Picture, piece_bytes: int) -> Iterator[PicturePiece]:
    if picture.num_bytes > MAX_PICTURE_BYTES:
        advice = "give a smaller one, or set the most pixels that the checkpoint's image processor makes"
        raise MessageTooLongError(
            f"a picture takes {picture.num_bytes} bytes, and may take {MAX_PICTURE_BYTES}; {advice}"
        )
    forms = []
    for name, array in picture.arrays.items():
        if array.dtype.str not in _DTYPES:
            raise TypeError(f"{name} of a picture is {array.dtype}; known: {', '.join(_DTYPES)}")
        forms.append(ArrayForm(name, array.dtype.str, list(array.shape)))
    yield PicturePiece(np.empty(0, np.uint8), forms)
    for array in picture.arrays.values():
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, len(flat), piece_bytes):
            yield PicturePiece(flat[start : start + piece_bytes])


class PictureIntake:
    """The core's end for all clients; one thread only."""

    def __init__(self, stats: PictureStats, ask_to_forget: Callable[[int], object]) -> None:
        """`stats`: kept up to date. `ask_to_forget`: called with a client whose pictures have to be sent anew."""
        self._stats, self._ask_to_forget = stats, ask_to_forget
        self._clients: dict[int, _ClientPictures] = {}

    def add_client(self, client_index: int, max_bytes: int) -> None:
        """Keep pictures of a client, up to `max_bytes`."""
        self._clients[client_index] = _ClientPictures(max_bytes, self._stats)

    def drop_client(self, client_index: int) -> None:
        """Drop the pictures of a client that has left."""
        self._clients.pop(client_index, None)

    def read(self, client_index: int, message: Any) -> Any:
        """Return a message for the busy loop, its pictures with their arrays; None if it is about pictures alone.

        A request whose pictures have not arrived is returned as it is, and is refused by the core's checks. Raises
        `WireError` for a piece of no picture.
        """
        match message:
            case PicturePiece():
                self._clients[client_index].take_piece(message)
                return None
            case ForgetPictures():
                self._clients[client_index].forget()
                return None
            case AddRequest(request) if request.pictures:
                try:
                    pictures = self._clients[client_index].received.restore(request.pictures)
                except LookupError:
                    self._ask_to_forget(client_index)
                    return message
                return msgspec.structs.replace(message, request=msgspec.structs.replace(request, pictures=pictures))
        return message


class _ClientPictures:
    """Pictures of one client: those that are kept, and the one that is arriving."""

    def __init__(self, max_bytes: int, stats: PictureStats) -> None:
        self.received = ReceivedPictures(max_bytes, stats)
        self._arriving: _ArrivingPicture | None = None

    def take_piece(self, piece: PicturePiece) -> None:
        """Copy a piece of the picture that is arriving, and keep that with its last piece. Raises `WireError`."""
        arriving, self._arriving = self._arriving, None  # a piece that does not fit ends its picture
        if len(self.received.arrived) >= _MAX_ARRIVED:
            raise WireError(f"{_MAX_ARRIVED} pictures have arrived, and no request that has them")
        if piece.forms:
            arriving = _ArrivingPicture(piece.forms, MAX_REQUEST_BYTES - self.received.num_arrived_bytes)
        if arriving is None:
            raise WireError("a piece of a picture that has not begun")
        if arriving.take(piece.data):
            self.received.add(Picture.of(arriving.arrays))
        else:
            self._arriving = arriving

    def forget(self) -> None:
        """Drop all of them."""
        self.received.clear()
        self._arriving = None


class _ArrivingPicture:
    """Arrays that are filled in order."""

    def __init__(self, forms: list[ArrayForm], room: int) -> None:
        """Make room for arrays of at most `room` bytes: memory that is not touched before it is filled."""
        if len(forms) > _MAX_ARRAYS or len({form.name for form in forms}) < len(forms):
            raise WireError(f"a picture has at most {_MAX_ARRAYS} arrays of different names")
        total = sum(map(_num_bytes, forms))
        if total > min(room, MAX_PICTURE_BYTES):
            raise WireError(f"a picture of {total} bytes: there is room for {min(room, MAX_PICTURE_BYTES)}")
        try:
            self.arrays = {form.name: np.empty(form.shape, _DTYPES[form.dtype]) for form in forms}
        except (ValueError, MemoryError) as problem:
            raise WireError(f"no room for a picture of {total} bytes: {problem}") from None
        flat = (array.reshape(-1).view(np.uint8) for array in self.arrays.values())
        self._unfilled = deque(each for each in flat if len(each))

    def take(self, data: np.ndarray) -> bool:
        """Copy the next bytes, which all belong to one array. Returns whether all arrays are full."""
        if data.dtype != np.uint8 or data.ndim != 1:
            raise WireError(f"a piece of a picture is uint8 of one dimension, not {data.dtype} {data.shape}")
        if len(data):
            if not self._unfilled or len(data) > len(self._unfilled[0]):
                raise WireError(f"a piece of {len(data)} bytes does not fit the array of a picture that it belongs to")
            first = self._unfilled.popleft()
            first[: len(data)] = data
            if len(data) < len(first):
                self._unfilled.appendleft(first[len(data) :])
        if self._unfilled:
            return False
        for name, array in self.arrays.items():
            if array.dtype == np.bool_ and array.view(np.uint8).max(initial=0) > 1:
                raise WireError(f"array {name:.40} of a picture holds bytes that are no bool")
        return True


def _num_bytes(form: ArrayForm) -> int:
    if form.dtype not in _DTYPES or len(form.shape) > 8 or min(form.shape, default=0) < 0:
        raise WireError(f"no picture has an array {form.dtype:.20} {form.shape!r:.80}")
    return math.prod(form.shape) * _DTYPES[form.dtype].itemsize
