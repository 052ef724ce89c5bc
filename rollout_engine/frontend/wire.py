"""What crosses between a client and the core's process, and how it becomes frames: both ends in one file.

    client ──> core    Hello  AddRequest  Abort  Call  RpcCall  Goodbye
    core ──> client    Welcome  Outputs  Refused  Reply  Rejected  Heartbeat  Farewell

A message is one zmq multipart: first the tagged struct as msgpack, then the bytes of its large arrays, untouched. An
array is `(dtype, shape, data)` in the struct, with `data` its bytes or the index of the frame that holds them. Decoding
is closed: an unknown tag, an unknown field, trailing bytes, an array that does not fit its bytes or a frame that no
array claims raises `WireError`, and nothing of the message is used.
"""

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from rollout_engine import errors
from rollout_engine.config import EngineConfig
from rollout_engine.errors import RequestError, RolloutEngineError, RPCError
from rollout_engine.messages import EngineCoreOutputs, EngineCoreRequest

PROTOCOL = 3
"""Both ends must speak the same."""
MAX_FRAME_BYTES = 64 << 20
"""A frame longer than this ends the connection it came over."""
MAX_FRAMES = 1024
"""Frames of one message."""

_INLINE_BYTES = 2048
"""Arrays up to this size travel inside the struct: a frame of their own would cost more than the copy."""
_DTYPES = {dtype.str: dtype for dtype in map(np.dtype, ("u1", "<i4", "<i8", "<f4", "<f8"))}

Frame = bytes | bytearray | memoryview


class WireError(RolloutEngineError):
    """Frames that are no message; they were dropped, and the connection goes on."""


class Failure(msgspec.Struct, frozen=True, tag="failure", forbid_unknown_fields=True):
    """An error as it travels: one of `rollout_engine.errors` by name, or what the other end met."""

    kind: str
    message: str
    field: str = ""
    bound: str = ""
    traceback: str = ""
    method: str = ""
    rank: int | None = None

    def as_error(self, method: str = "") -> RolloutEngineError:
        """The same error on this end. `method` is the call that failed, if it was one."""
        if self.kind in ("RPCError", "RPCTimeoutError"):
            where = dict(method=self.method, rank=self.rank, traceback=self.traceback)
            return _ERRORS[self.kind](self.message, **where)
        if self.kind == "RequestError":
            return RequestError(self.message, field=self.field, bound=self.bound)
        if self.kind in _ERRORS:
            return _ERRORS[self.kind](self.message)
        return RPCError(f"{method}: {self.kind}: {self.message}", method=method, traceback=self.traceback)


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready", forbid_unknown_fields=True):
    """A core that has loaded its model says so, and what a client needs to know of it."""

    protocol: int
    pid: int
    config: EngineConfig
    config_digest: str
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    choices: str
    """Every choice made at start-up, for one log line."""
    heartbeat_seconds: float
    """How often the core gives a sign of life."""
    policy_version: int
    dtype: str
    """Dtype of the weights, such as "float32"."""


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """A client's first message."""

    protocol: int


class AddRequest(msgspec.Struct, frozen=True, tag="add", forbid_unknown_fields=True):
    """Answered by `Outputs`, the last of which ends it, or by `Refused`."""

    request: EngineCoreRequest


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True):
    """End sequences; unknown numbers are a no-op."""

    sequences: list[int]


class Call(msgspec.Struct, frozen=True, tag="call", forbid_unknown_fields=True):
    """Run a registered utility. Answered by the `Reply` with the same number."""

    number: int
    name: str
    arguments: msgspec.Raw
    """msgpack map, of the types that the utility declares (`pack`)."""


class RpcCall(msgspec.Struct, frozen=True, tag="rpc", forbid_unknown_fields=True):
    """Call a method of the workers' extensions. Answered by the `Reply` with the same number, one result per rank."""

    number: int
    method: str
    arguments: msgspec.Raw
    """[positional, by name], as `rpc_wire` packs them."""
    arrays: list[np.ndarray]
    """uint8 each: of `arguments`."""
    deadline: float | None = None
    """Not to begin after it: seconds on the system's monotonic clock."""


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye", forbid_unknown_fields=True):
    """The client leaves; what it has open is aborted."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """Answer to `Hello`."""

    client_index: int
    ready: Ready


class Outputs(msgspec.Struct, frozen=True, tag="outputs", forbid_unknown_fields=True):
    """What steps brought to one client's requests."""

    number: int
    """0, 1, 2, ... per client: a gap means that messages were lost."""
    steps: list[EngineCoreOutputs]
    """In order."""


class Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """The core did not take a request."""

    first_sequence: int
    """The request's."""
    failure: Failure


class Reply(msgspec.Struct, frozen=True, tag="reply", forbid_unknown_fields=True):
    """Result of a call, or its failure."""

    number: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    failure: Failure | None = None
    arrays: list[np.ndarray] = []
    """Of the result of an `RpcCall`."""


class Rejected(msgspec.Struct, frozen=True, tag="rejected", forbid_unknown_fields=True):
    """Frames came that are no message, or not one for now; they were dropped."""

    reason: str


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", forbid_unknown_fields=True):
    """The core's process lives, however long its step takes."""


class Farewell(msgspec.Struct, frozen=True, tag="farewell", forbid_unknown_fields=True):
    """The last message to a client: the core ends, or will have nothing to do with this client any more."""

    reason: str


class IoStats(msgspec.Struct):
    """What the core's end of the socket has seen since start."""

    num_clients: int = 0
    """Connected now."""
    num_rejected: int = 0
    """Messages that could not be decoded, or came from strangers."""
    num_clients_cut_off: int = 0
    """Clients that stopped reading."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `check_health`."""

    pid: int
    """Of the core's process."""
    policy_version: int
    num_unfinished_requests: int
    """Of all clients."""
    num_steps: int
    io: IoStats


ToCore = Hello | AddRequest | Abort | Call | RpcCall | Goodbye
ToClient = Welcome | Outputs | Refused | Reply | Rejected | Heartbeat | Farewell
Message = TypeVar("Message")

_ERRORS = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
} | {"WireError": WireError}


class Encoder:
    """Messages to frames. One thread at a time: the first frame is a buffer that the next message overwrites."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._array)
        self._first = bytearray()
        self._arrays: list[memoryview] = []

    def encode(self, message: Any) -> list[Frame]:
        """Frames of a message. Array frames are views of the arrays themselves."""
        self._arrays = []
        self._encoder.encode_into(message, self._first)
        return [self._first, *self._arrays]

    def _array(self, value: Any) -> Any:
        array = _as_sendable(value)
        if array.nbytes <= _INLINE_BYTES:
            return array.dtype.str, array.shape, array.tobytes()
        self._arrays.append(memoryview(array.reshape(-1).view(np.uint8)))
        return array.dtype.str, array.shape, len(self._arrays)


class Decoder(Generic[Message]):
    """Frames to messages of one union. One thread at a time."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union, dec_hook=self._array)
        self._frames: Sequence[Frame] = ()
        self._unclaimed: set[int] = set()

    def decode(self, frames: Sequence[Frame]) -> Message:
        """The message, its large arrays read-only views of their frames. Raises `WireError`."""
        if not 1 <= len(frames) <= MAX_FRAMES:
            raise WireError(f"a message has 1 to {MAX_FRAMES} frames, not {len(frames)}")
        self._frames, self._unclaimed = frames, set(range(1, len(frames)))
        try:
            message: Message = self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError, OverflowError) as problem:
            raise WireError(f"no message: {problem}") from None
        finally:
            self._frames = ()
        if self._unclaimed:
            raise WireError(f"{len(self._unclaimed)} of {len(frames)} frames belong to nothing in the message")
        return message

    def _array(self, kind: type, value: Any) -> np.ndarray:
        return _array_from(value, self._claim)

    def _claim(self, index: int) -> Frame:
        if index not in self._unclaimed:
            raise ValueError(f"frame {index} is absent, or claimed twice")
        self._unclaimed.remove(index)
        return self._frames[index]


def pack(value: Any) -> msgspec.Raw:
    """A value on its own, arrays inside. Raises `TypeError` for what has no place on the wire (a callable, say)."""
    return msgspec.Raw(msgspec.msgpack.encode(value, enc_hook=_inline))


def unpack(raw: Frame | msgspec.Raw, kind: Any) -> Any:
    """What `pack` made, as `kind`. Raises `WireError`."""
    try:
        return msgspec.msgpack.decode(raw, type=kind, dec_hook=lambda _, value: _array_from(value, _no_frames))
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError, OverflowError) as problem:
        raise WireError(str(problem)) from None


def failure_of(error: BaseException, traceback: str = "") -> Failure:
    """How `error` travels."""
    kind = type(error).__name__
    if isinstance(error, RPCError):
        return Failure(kind, str(error), traceback=error.traceback, method=error.method, rank=error.rank)
    known = _ERRORS.get(kind) is type(error)
    field, bound = getattr(error, "field", ""), getattr(error, "bound", "")
    is_request = isinstance(error, RequestError)
    return Failure(
        kind, str(error), field if is_request else "", bound if is_request else "", "" if known else traceback
    )


def _inline(value: Any) -> Any:
    array = _as_sendable(value)
    return array.dtype.str, array.shape, array.tobytes()


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
    data = claim(data) if isinstance(data, int) else bytearray(data)
    dtype = _DTYPES[name]
    if math.prod(shape) * dtype.itemsize != len(memoryview(data).cast("B")):
        raise ValueError(f"an array {name} {shape!r:.80} does not have {len(data)} bytes")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def _no_frames(index: int) -> Frame:
    raise ValueError(f"frame {index}: arrays of calls travel inside them")
