"""One end of a stream socket that carries MessagePack messages, each after its length of eight bytes."""

import os
import socket
import struct
import threading
import weakref
from functools import cache
from typing import Any

import msgspec

MAX_BYTES = 1 << 30
"""Bytes of one message at most, unless a channel is made for more or fewer."""
_LENGTH_BYTES = 8


class Channel:
    """One end of a socket between two processes. Several threads may send; one receives.

    A forked child's copy is closed: it would hide the end of this process from the other one.

    Args:
        end: a connected stream socket that blocks.
        max_bytes: bytes of the longest message that is received.
    """

    def __init__(self, end: socket.socket, max_bytes: int = MAX_BYTES) -> None:
        self.socket = end
        end.set_inheritable(False)
        self._max_bytes = max_bytes
        self._sending = threading.Lock()
        self._timeouts: dict[int, float | None] = {}
        """Option of the socket -> seconds that it is set to."""
        self._length, self._body = bytearray(_LENGTH_BYTES), bytearray()
        self._num_received = 0
        """Bytes of the next message that have arrived, its length included."""
        _HERE.add(self)

    def send(self, message: Any, timeout: float | None = None) -> None:
        """Send a message. Raises `OSError` if the other end is gone, or reads nothing for `timeout` seconds."""
        self.send_body(msgspec.msgpack.encode(message), timeout)

    def send_body(self, body: bytes, timeout: float | None = None) -> None:
        """Send a message that is encoded already."""
        with self._sending:
            self._set_timeout(socket.SO_SNDTIMEO, timeout)
            self.socket.sendall(len(body).to_bytes(_LENGTH_BYTES, "little") + body)

    def receive(self, kind: Any, timeout: float | None = None) -> Any:
        """Wait for the next message, of type `kind`.

        Raises `EOFError` or `OSError` if the other end is gone, `TimeoutError` if it sends nothing for `timeout`
        seconds (a later call continues with the same message), and `msgspec.DecodeError` for bytes that are no message.
        """
        self._set_timeout(socket.SO_RCVTIMEO, timeout)
        if self._num_received < _LENGTH_BYTES:
            self._fill(self._length, 0)
            length = int.from_bytes(self._length, "little")
            if length > self._max_bytes:
                raise msgspec.DecodeError(f"a message of {length} bytes: something else has written to the connection")
            self._body = bytearray(length)
        self._fill(self._body, _LENGTH_BYTES)
        body, self._body, self._num_received = self._body, bytearray(), 0
        try:
            return _decoder(kind).decode(body)
        except (UnicodeDecodeError, RecursionError) as problem:
            raise msgspec.DecodeError(str(problem)) from None

    def close(self) -> None:
        """Close this end, which the other end notices, and a thread that waits here."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end is gone
        self.socket.close()

    def _fill(self, buffer: bytearray, start: int) -> None:
        """Receive until `buffer` is full, whose first byte is byte `start` of the message."""
        view = memoryview(buffer)
        while self._num_received < start + len(buffer):
            try:
                count = self.socket.recv_into(view[self._num_received - start :])
            except BlockingIOError:
                raise TimeoutError("the other end has sent nothing") from None
            if not count:
                raise EOFError("the other end is gone")
            self._num_received += count

    def _set_timeout(self, option: int, seconds: float | None) -> None:
        """Let calls of the system give up after `seconds`, in one direction alone."""
        if self._timeouts.get(option) != seconds:
            microseconds = 0 if seconds is None else max(int(seconds * 1e6), 1)  # 0: no limit
            self.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *divmod(microseconds, 1_000_000)))
            self._timeouts[option] = seconds


@cache
def _decoder(kind: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(kind)


_HERE: "weakref.WeakSet[Channel]" = weakref.WeakSet()


def _close_all() -> None:
    """Close a forked child's copies, which would keep processes alive that this one's parent has left."""
    for channel in list(_HERE):
        channel.socket.close()
        channel._sending = threading.Lock()  # a thread that the child does not have may hold it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
