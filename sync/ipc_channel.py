"""The socket of the ipc transport: messages between its two ends, in `sync.ipc`.

Handles travel as plain numbers in typed messages over a socket in a directory which only this user may enter. Every
message carries the number that its Request drew, so messages of an earlier attempt are never taken for an answer.
"""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from sync.described_types import describe_types
from sync.errors import ManifestMismatch, SyncError, TransferTimeout
from sync.groups import check_timeout
from sync.shared_files import check_private, make_private, open_sole
from sync.shared_memory import MemoryHandle

_MAX_MESSAGE_BYTES = 64 << 20
_SOCKET, _LOCK = "weights.sock", "weights.lock"
_CLOSED = "This end of the weight transport was closed."


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A message, with the fields of every one."""

    transfer: int
    """Number of this transfer, drawn anew by each Request."""


class Request(Message, frozen=True, forbid_unknown_fields=True):
    """The engine asks for the weights of this manifest; `memory` names the memory that it can open."""

    version: int
    digest: str
    memory: str


class InPlaceTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that the engine copies from the trainer's own memory."""

    name: str
    handle: int
    """Index in `Shared.handles`."""
    start: int
    """First byte of the tensor in that memory."""


class Shared(Message, frozen=True, forbid_unknown_fields=True):
    """The trainer's memory: first the two buffers for packed tensors, then that of tensors in place."""

    handles: list[MemoryHandle]
    bucket_bytes: int
    in_place: list[InPlaceTensor]


class Refused(Message, frozen=True, forbid_unknown_fields=True):
    """The trainer has something else on offer."""

    reason: str


class Filled(Message, frozen=True, forbid_unknown_fields=True):
    """Bucket k is in buffer k mod 2."""

    k: int


class Taken(Message, frozen=True, forbid_unknown_fields=True):
    """Bucket k has been unpacked; its buffer is free."""

    k: int


class Done(Message, frozen=True, forbid_unknown_fields=True):
    """Everything has been unpacked."""


class GaveUp(Message, frozen=True, forbid_unknown_fields=True):
    """The engine takes no more of this transfer."""

    reason: str


ToTrainer = Request | Taken | Done | GaveUp
ToEngine = Shared | Refused | Filled
describe_types(ToTrainer, ToEngine)
_Expected = TypeVar("_Expected", bound=Message)


class Channel:
    """One end of the socket: typed messages with a deadline. Invalid frames are counted and dropped.

    One thread sends and receives; any thread may close. A socket is closed by a thread that has it to itself: where one
    waits at it, `close` wakes that one, and it closes the socket on its way out.
    """

    def __init__(self, directory: Path, *, binds: bool, accepts: Any, timeout: float) -> None:
        check_timeout(timeout)
        self.num_dropped = 0
        self._accepts, self._timeout = accepts, timeout
        self._lock = -1
        self._in_use, self._closing = threading.Lock(), threading.Lock()
        self._is_closed = False
        self._woken, self._wake = os.pipe()
        """Ends of a pipe: something can be read from it once the channel is closed."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.maxmsgsize = _MAX_MESSAGE_BYTES
        address = f"ipc://{directory / _SOCKET}"
        try:
            if binds:
                make_private(directory)
                self._lock = open_sole(directory / _LOCK)  # binding alone would take the address from another
                self._socket.bind(address)
            else:
                check_private(directory)
                self._socket.connect(address)
        except (OSError, SyncError) as problem:
            self.close()
            why = problem.strerror if isinstance(problem, OSError) else problem
            raise SyncError(f"Trainer and engine cannot meet in {directory}: {why}.") from None

    def send(self, message: Message, *, waits: bool = True) -> None:
        """Send `message`. `TransferTimeout` if no peer takes it, or not at once and this does not wait."""
        with self._lock_socket():
            if not self._is_ready(zmq.POLLOUT, self._timeout if waits else 0.0):
                raise TransferTimeout(f"No engine connected to take weights within {self._timeout:g} s.")
            self._socket.send(msgspec.msgpack.encode(message))

    def expect(self, kind: type[_Expected], transfer: int | None = None, *, latest: bool = False) -> _Expected:
        """The next message of `kind` (of `transfer`), dropping others; `Refused` and `GaveUp` of it are raised.

        `latest` takes the last of those that have arrived. `TransferTimeout` if none arrives, even if others do.
        """
        deadline = time.monotonic() + self._timeout
        found: _Expected | None = None
        with self._lock_socket():
            while (left := deadline - time.monotonic()) > 0 and self._is_ready(zmq.POLLIN, 0 if found else left):
                message = self._receive_message()
                belongs = message is not None and transfer in (None, message.transfer)
                if belongs and isinstance(message, Refused):
                    raise ManifestMismatch(message.reason)
                elif belongs and isinstance(message, GaveUp) and transfer is not None:
                    raise SyncError(f"The engine took no more of the weights: {message.reason}")
                elif belongs and isinstance(message, kind):
                    found = message
                    if not latest:
                        break
                else:
                    self.num_dropped += 1
        if found is None:
            raise TransferTimeout(f"The other side of the weight transport was silent for {self._timeout:g} s.")
        return found

    def await_device(self, wait: Callable[[float], bool]) -> None:
        """Wait, by a `SharedMemory.mark`, for the device. `TransferTimeout` if it does not end."""
        if not wait(self._timeout):
            raise TransferTimeout(f"The device has not copied weights within {self._timeout:g} s.")

    def close(self) -> None:
        """Close the channel, from any thread, at once; who waits at it gets a `SyncError`. No-op the second time."""
        with self._closing:
            if not self._is_closed:
                os.write(self._wake, b"\0")  # first: once it is closed, the pipe may be gone
                self._is_closed = True
        self._close_unused()

    @contextlib.contextmanager
    def _lock_socket(self) -> Iterator[None]:
        """Have the socket to oneself. Raises `SyncError` once the channel is closed."""
        try:
            with self._in_use:
                if self._is_closed:
                    raise SyncError(_CLOSED)
                yield
        finally:
            self._close_unused()

    def _close_unused(self) -> None:
        if self._is_closed and self._in_use.acquire(blocking=False):
            try:
                if not self._socket.closed:
                    self._socket.close()
                    self._context.term()
                    for descriptor in (self._woken, self._wake, self._lock):
                        if descriptor >= 0:
                            os.close(descriptor)
            finally:
                self._in_use.release()

    def _is_ready(self, events: int, seconds: float) -> bool:
        """Whether the socket is, after waiting at most so long. Raises `SyncError` when the channel is closed."""
        poller = zmq.Poller()
        poller.register(self._socket, events)
        poller.register(self._woken, zmq.POLLIN)
        ready = dict(poller.poll(math.ceil(seconds * 1e3)))
        if self._woken in ready:
            raise SyncError(_CLOSED)
        return self._socket in ready

    def _receive_message(self) -> Message | None:
        """The next message; None for a frame that is none."""
        try:
            message: Message = msgspec.msgpack.decode(self._socket.recv(), type=self._accepts)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return message
