"""zmq's end of a client's connection to a core: frames go out and come in, and its loss is told.

It belongs to one thread, which may be another than the one that makes it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from rollout_engine.process.authentication import show_token
from rollout_engine.process.parts import receive
from rollout_engine.process.wire import MAX_FRAME_BYTES, Frame

_NEVER_MS = 1 << 30


class CoreLink:
    """A connection. `socket` is readable when frames have come, `monitor` when the connection is lost."""

    def __init__(self, address: str, token: bytes) -> None:
        self._context = zmq.Context(io_threads=1)
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 100)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # no limit: callers wait for the answers
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        # A core that is gone does not come back; but "never" (-1) would drop what it sent before and is not read yet.
        self.socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        show_token(self.socket, token)
        self.socket.connect(address)

    def send(self, multiparts: Iterable[Sequence[Frame]]) -> None:
        """Send messages, each a list of frames; they are dropped if the connection is lost."""
        for first, *others in multiparts:
            try:
                self.socket.send(first, zmq.NOBLOCK | (zmq.SNDMORE if others else 0))
            except zmq.Again:  # as the monitor tells
                return
            for i, frame in enumerate(others, start=1):
                self.socket.send(frame, zmq.SNDMORE if i < len(others) else 0, copy=False)

    def receive(self) -> list[Any] | None:
        """The frames of the next message; None: none has come."""
        try:
            return receive(self.socket)
        except zmq.ZMQError:
            return None

    def wait_until_lost(self, seconds: float) -> None:
        """Return once zmq has noticed the end of the connection, or after `seconds`."""
        self.monitor.poll(1000 * seconds)

    def why_lost(self) -> str:
        """Why the connection has ended."""
        while self.monitor.poll(0):
            if recv_monitor_message(self.monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                return "it did not take the token in its directory, which is another core's now"
        return "its connection is lost"

    def close(self) -> None:
        """End it; what was sent has a moment to go out."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()
        self._context.term()
