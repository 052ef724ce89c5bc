"""Long messages in parts: both ends in one file. A part is a message itself; messages between parts overtake them.

    frames ── in_parts ──> [struct, arrays]                      one zmq multipart, if it is small
                           Part  Part  ...  Part                 else: the frames end to end, cut into pieces
    zmq multiparts ── Assembler.read ──> message

The frames of a long message begin at multiples of 16 bytes, so that arrays can be read in place.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import zmq

from rollout_engine.children.failure import WireError
from rollout_engine.children.values import Frame
from rollout_engine.process.wire import Decoder, Limits, Part

PART_BYTES = 1 << 20
"""Bytes of one zmq multipart, about."""
_MAX_FRAMES_AT_ONCE = 64
"""Frames of a message that is sent as it is."""
_ALIGNMENT = 16
_EMPTY = np.empty(0, np.uint8)


def in_parts(frames: Sequence[Frame], limits: Limits) -> Iterator[list[Frame]]:
    """Return the zmq multiparts that carry a message. Raises `MessageTooLongError`.

    All but the first frame are not copied; the first one is, if there are several parts.
    """
    sizes = [len(frame) for frame in frames]
    limits.check_sizes(sizes[0], sum(map(_pad_size, sizes)), len(sizes))
    if len(frames) <= _MAX_FRAMES_AT_ONCE and sum(sizes) <= PART_BYTES:
        return iter([[*frames]])
    return _parts([bytes(frames[0]), *frames[1:]], sizes)


def receive(socket: zmq.Socket[bytes]) -> list[Frame]:
    """Receive a zmq multipart. Raises `zmq.Again` if there is none. Of one that is too long only the beginning is kept.

    A ROUTER's begins with the identity of its sender.
    """
    frames: list[Frame] = []
    more = True
    while more:
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        if len(frames) <= _MAX_FRAMES_AT_ONCE + 1:
            frames.append(frame.buffer)
        more = bool(socket.getsockopt(zmq.RCVMORE))
    return frames


def _parts(frames: list[Frame], sizes: list[int]) -> Iterator[list[Frame]]:
    num_bytes_left = sum(map(_pad_size, sizes))
    for data in _pieces(frames):
        num_bytes_left -= len(data)
        array = "|u1", [len(data)], 1
        part = {"type": "part", "data": array, "num_bytes_left": num_bytes_left, "sizes": sizes}
        yield [msgspec.msgpack.encode(part), data]
        sizes = []


def _pieces(frames: list[Frame]) -> Iterator[Frame]:
    """Yield the padded frames end to end, in pieces of `PART_BYTES`."""
    piece: list[Frame] = []
    room = PART_BYTES
    for frame in frames:
        for view in (memoryview(frame), memoryview(bytes(_pad_size(len(frame)) - len(frame)))):
            while len(view):
                piece.append(view[:room])
                room -= len(piece[-1])
                view = view[len(piece[-1]) :]
                if not room:
                    yield piece[0] if len(piece) == 1 else b"".join(piece)
                    piece, room = [], PART_BYTES
    if piece:
        yield b"".join(piece)


class Assembler:
    """Reads the messages of one sender, and assembles those that arrive in parts."""

    def __init__(self, decoder: Decoder[Any], limits: Limits) -> None:
        self._decoder, self._limits = decoder, limits
        self.num_bytes = 0
        """Bytes of the last message."""
        self._buffer = _EMPTY
        self._sizes: list[int] = []
        self._num_bytes_left = 0

    def read(self, frames: Sequence[Frame]) -> Any:
        """Return the message that these frames complete; None: more parts have to arrive. Raises `WireError`."""
        if len(frames) > _MAX_FRAMES_AT_ONCE:
            raise WireError(f"a message that is sent at once has at most {_MAX_FRAMES_AT_ONCE} frames")
        message = self._decoder.decode(frames)
        if not isinstance(message, Part):
            self.num_bytes = sum(map(len, frames))
            return message
        if message.sizes:
            self._begin(message)
        data, num_bytes_left = message.data.reshape(-1), message.num_bytes_left
        length = len(data)
        if data.dtype != np.uint8 or not length or not 0 <= num_bytes_left == self._num_bytes_left - length:
            expected, self._num_bytes_left, self._buffer = self._num_bytes_left, 0, _EMPTY
            raise WireError(f"a part of {length} bytes does not fit a message of which {expected} are to come")
        start = len(self._buffer) - self._num_bytes_left
        self._buffer[start : start + length] = data
        self._num_bytes_left = num_bytes_left
        return None if num_bytes_left else self._finish()

    def _begin(self, part: Part) -> None:
        """Make room for a message: memory that is not touched before its bytes arrive."""
        self._buffer, self._num_bytes_left = _EMPTY, 0
        num_bytes = sum(map(_pad_size, part.sizes))
        try:
            if min(part.sizes) < 0:
                raise ValueError("no frame has fewer than 0 bytes")
            self._limits.check_sizes(part.sizes[0], num_bytes, len(part.sizes))
        except ValueError as problem:
            raise WireError(f"a message in parts: {problem}") from None
        self._buffer, self._sizes, self._num_bytes_left = np.empty(num_bytes, np.uint8), part.sizes, num_bytes

    def _finish(self) -> Any:
        view, self._buffer = self._buffer.data, _EMPTY
        frames: list[Frame] = []
        start = 0
        for size in self._sizes:
            frame = view[start : start + size]
            frames.append(frame if size > PART_BYTES else bytes(frame))  # else one array would keep all the others
            start += _pad_size(size)
        message = self._decoder.decode(frames)
        if isinstance(message, Part):
            raise WireError("a part has no parts")
        self.num_bytes = len(view)
        return message


def _pad_size(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
