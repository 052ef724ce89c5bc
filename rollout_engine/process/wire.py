"""Messages between a client and a core's process, and their encoding as frames: both ends in one file.

    client ──> core    Hello  AddRequest  Abort  Call  Cancel  Goodbye  Part  PicturePiece  ForgetPictures
    core ──> client    Welcome  Outputs  Refused  Reply  Rejected  LiveVersion  Heartbeat  Draining  Farewell  Part
                       ForgetPictures

A message is a list of frames: first the tagged struct as msgpack, then the bytes of its large arrays, not copied. A
small message is one zmq multipart; a larger one travels in parts (`rollout_engine.process.parts`). In the struct an
array is `(dtype, shape, data)`, with `data` its bytes or the index of the frame that holds them. Decoding
is strict: an unknown tag, an unknown field, trailing bytes, an array that does not fit its bytes or a frame that no
array refers to raises `WireError`, and nothing of the message is used.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np

from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest
from rollout_engine.children.failure import Failure, WireError
from rollout_engine.children.values import Frame
from rollout_engine.engine.client import EngineInfo
from sync.described_types import describe_types

PROTOCOL = 24
"""Version of the messages; both ends must have the same."""
MAX_STRUCT_BYTES = 1 << 20
"""Bytes of a message without its arrays, at most: decoding them holds the interpreter."""
MAX_MESSAGE_BYTES = 256 << 20
"""Bytes of a message at most, its arrays included."""
MAX_FRAMES = 65_536
"""Frames of a message at most."""
MAX_FRAME_BYTES = 2 << 20
"""A zmq frame longer than this ends the connection it arrives on. Those that are sent have half of it at most."""

_INLINE_BYTES = 2048
"""Arrays up to this size are sent inside the struct: a frame of their own would cost more than the copy."""
_DTYPES = {dtype.str: dtype for dtype in map(np.dtype, ("u1", "<i2", "<i4", "<i8", "<f4", "<f8"))}


class MessageTooLongError(ValueError):
    """A message that the other end would not take; nothing of it was sent."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, tag="limits", forbid_unknown_fields=True):
    """Limits on messages to one end. It sends them to the other one at the start, which sends nothing beyond them."""

    struct_bytes: Annotated[int, msgspec.Meta(ge=1 << 12)] = MAX_STRUCT_BYTES
    message_bytes: Annotated[int, msgspec.Meta(ge=1 << 12)] = MAX_MESSAGE_BYTES

    def check_sizes(self, struct_bytes: int, message_bytes: int, num_frames: int = 1) -> None:
        """Raise `MessageTooLongError` for a message of these sizes."""
        for count, most, what in (
            (struct_bytes, self.struct_bytes, "bytes beside its arrays of numbers; give long data as arrays or bytes"),
            (message_bytes, self.message_bytes, "bytes in all; divide it among several calls"),
            (num_frames, MAX_FRAMES, "arrays; join them, or divide them among several calls"),
        ):
            if count > most:
                raise MessageTooLongError(f"it takes {count} and may take {most} {what}")


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready", forbid_unknown_fields=True):
    """A core has loaded its model: facts about it for a client."""

    protocol: int
    pid: int
    config_digest: str
    heartbeat_seconds: float
    """How often the core sends a sign of life."""
    policy_version: int
    info: EngineInfo
    address: str = ""
    """Its TCP address; "": it does not listen on TCP."""


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """A client's first message."""

    protocol: int
    limits: Limits = Limits()
    """Limits on messages to the client."""


class AddRequest(msgspec.Struct, frozen=True, tag="add", forbid_unknown_fields=True):
    """Queue a request. Answered by `Outputs` until its sequences have ended, or by `Refused`."""

    request: EngineCoreRequest
    """Its pictures are digests alone: their arrays precede it, or are kept at the core (`picture_pieces`)."""
    columns: dict[str, np.ndarray] = {}
    """Its long lists, which `rollout_engine.process.request_columns` takes out of it and puts back."""


class ArrayForm(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Name, dtype and shape of an array of a picture."""

    name: str
    dtype: str
    shape: list[int]


class PicturePiece(msgspec.Struct, frozen=True, tag="picture", forbid_unknown_fields=True):
    """The next bytes of a picture: its arrays end to end, each piece of one array."""

    data: np.ndarray
    """uint8."""
    forms: list[ArrayForm] = []
    """The form of each array, in the first piece of a picture."""


class ForgetPictures(msgspec.Struct, frozen=True, tag="forget_pictures", forbid_unknown_fields=True):
    """From the client: its later requests rely on no picture that it has sent. From the core: send this."""


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True):
    """End sequences; unknown ids are a no-op."""

    sequence_ids: list[int]


class Call(msgspec.Struct, frozen=True, tag="call", forbid_unknown_fields=True):
    """Call a verb. Answered by the `Reply` with the same number, unless it is cancelled."""

    number: int
    name: str
    arguments: msgspec.Raw
    """Arguments by name, encoded by `rollout_engine.children.values.pack`."""
    arrays: list[np.ndarray] = []
    """Arrays of `arguments`, uint8 each."""
    deadline: float | None = None
    """When the caller stops waiting, on the core's `time.monotonic()`; a call that has not begun by then never does."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel", forbid_unknown_fields=True):
    """Take a call back: one that has not begun never does, and no caller waits for one that has. There is no reply."""

    number: int


class Part(msgspec.Struct, frozen=True, tag="part", forbid_unknown_fields=True):
    """The next bytes of a long message. Its parts arrive in order; other messages may arrive between them."""

    data: np.ndarray
    """uint8."""
    num_bytes_left: int
    """Bytes of the message that follow these."""
    sizes: list[int] = []
    """Bytes of every frame of the message, in its first part."""


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye", forbid_unknown_fields=True):
    """The client leaves; its requests are aborted."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """Answer to `Hello`."""

    client_index: int
    ready: Ready
    limits: Limits = Limits()
    """Largest messages that the core reads."""
    clock: float = 0.0
    """`time.monotonic()` of the core as it sent this."""


class Outputs(msgspec.Struct, frozen=True, tag="outputs", forbid_unknown_fields=True):
    """Outputs of one client's requests."""

    steps: list[EngineCoreOutputs]
    """One entry a step, in order."""
    number: int = 0
    """Counts the messages to this client from 0, filled in when they are sent; a gap means that some were lost."""


class Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """The core refused a request."""

    first_sequence_id: int
    """First sequence id of the request."""
    failure: Failure


class Reply(msgspec.Struct, frozen=True, tag="reply", forbid_unknown_fields=True):
    """The result of a call, or its error."""

    number: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    failure: Failure | None = None
    arrays: list[np.ndarray] = []
    """Arrays of `result`, uint8 each."""
    long_result: np.ndarray | None = None
    """`result`, as uint8, if it is long."""


class Rejected(msgspec.Struct, frozen=True, tag="rejected", forbid_unknown_fields=True):
    """The core dropped frames of this client: they are no message, or not one that is allowed now."""

    reason: str


class LiveVersion(msgspec.Struct, frozen=True, tag="version", forbid_unknown_fields=True):
    """The weights or an adapter have changed. It is sent before any output sampled under the new version."""

    policy_version: int


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", forbid_unknown_fields=True):
    """The core's process is alive, however long its step takes."""

    clock: float = 0.0
    """`time.monotonic()` of the core as it sent this."""


class Draining(msgspec.Struct, frozen=True, tag="draining", forbid_unknown_fields=True):
    """The core ends its requests in flight, refuses new ones from now on, and then ends itself."""

    reason: str


class Farewell(msgspec.Struct, frozen=True, tag="farewell", forbid_unknown_fields=True):
    """The last message to a client: the core ends, or has cut this client off."""

    reason: str


ToCore = Hello | AddRequest | PicturePiece | ForgetPictures | Abort | Call | Cancel | Part | Goodbye
_Notice = Rejected | LiveVersion | Heartbeat | ForgetPictures | Draining | Farewell
ToClient = Welcome | Outputs | Refused | Reply | Part | _Notice
describe_types(ToCore, ToClient, Ready | Failure)
Message = TypeVar("Message")


class Encoder:
    """Encodes messages as frames. The first frame is a buffer that the next message overwrites; not thread-safe."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._array)
        self._first = bytearray()
        self._arrays: list[memoryview] = []

    def encode(self, message: Any) -> list[Frame]:
        """Return the frames of a message. Those of arrays are views of the arrays' memory."""
        self._arrays = []
        self._encoder.encode_into(message, self._first)
        return [self._first, *self._arrays]

    def _array(self, value: Any) -> Any:
        array = _as_sendable(value)
        if array.nbytes <= _INLINE_BYTES:
            return array.dtype.str, array.shape, array.tobytes()
        self._arrays.append(array.reshape(-1).view(np.uint8).data)
        return array.dtype.str, array.shape, len(self._arrays)


class Decoder(Generic[Message]):
    """Decodes frames as messages of one union. Not thread-safe."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union, dec_hook=self._array)
        self._frames: Sequence[Frame] = ()
        self._unclaimed: set[int] = set()

    def decode(self, frames: Sequence[Frame]) -> Message:
        """Return the message; its large arrays are views of their frames. Raises `WireError`."""
        if not 1 <= len(frames) <= MAX_FRAMES:
            raise WireError(f"a message has 1 to {MAX_FRAMES} frames, not {len(frames)}")
        if len(frames[0]) > MAX_STRUCT_BYTES:
            raise WireError(f"a message has at most {MAX_STRUCT_BYTES} bytes beside its arrays, not {len(frames[0])}")
        self._frames, self._unclaimed = frames, set(range(1, len(frames)))
        try:
            message: Message = self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError, OverflowError) as problem:
            raise WireError(f"no message: {problem}") from None
        finally:
            self._frames = ()
        if self._unclaimed:
            raise WireError(f"{len(self._unclaimed)} of {len(frames)} frames belong to no array of the message")
        return message

    def _array(self, kind: type, value: Any) -> np.ndarray:
        return _array_from(value, self._claim)

    def _claim(self, index: int) -> Frame:
        if index not in self._unclaimed:
            raise ValueError(f"frame {index} is absent, or claimed twice")
        self._unclaimed.remove(index)
        return self._frames[index]


def _as_sendable(value: Any) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} has no place in a message: {value!r:.80}")
    if value.dtype.str not in _DTYPES:
        raise TypeError(f"arrays of {value.dtype} have no place in a message; known: {', '.join(_DTYPES)}")
    return np.ascontiguousarray(value)


def _array_from(value: Any, claim: Any) -> np.ndarray:
    match value:
        case [str(name), [*shape], bytes() | int() as data] if name in _DTYPES:
            pass
        case _:
            raise ValueError("expected an array (dtype, shape, data)")
    if not all(type(length) is int and length >= 0 for length in shape) or len(shape) > 8:
        raise ValueError(f"no array has shape {shape!r:.80}")
    buffer: Frame = claim(data) if isinstance(data, int) else bytearray(data)
    dtype = _DTYPES[name]
    if math.prod(shape) * dtype.itemsize != len(memoryview(buffer).cast("B")):
        raise ValueError(f"an array {name} {shape!r:.80} does not have {len(buffer)} bytes")
    return np.frombuffer(buffer, dtype=dtype).reshape(shape)
