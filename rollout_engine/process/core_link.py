"""zmq's end of a client's connection to a core: frames are sent and received, and its loss is reported.

It belongs to one thread, which may be another than the one that makes it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from rollout_engine.children.values import Frame
from rollout_engine.process.parts import receive
from rollout_engine.process.wire import MAX_FRAME_BYTES

_NEVER_MS = 1 << 30


class CoreLink:
    """A connection. `socket` is readable when frames have arrived, `monitor` when the connection is lost."""

    def __init__(
        self,
        address: str,
        introduce: Callable[[zmq.Socket[bytes]], object],
        losses: Mapping[int, str],
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        """`introduce` makes a socket show who its client is. `losses`: zmq's events that mean the end, and their words.

        `on_close` is called when the connection is closed.
        """
        self._losses, self._on_close = losses, on_close
        self._context = zmq.Context(io_threads=1)
        self.socket = self.new_socket(introduce)
        self.socket.setsockopt(zmq.LINGER, 100)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # no limit: callers wait for the answers
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.monitor = self.socket.get_monitor_socket(sum(losses))
        self.socket.connect(address)

    def new_socket(self, introduce: Callable[[zmq.Socket[bytes]], object]) -> zmq.Socket[bytes]:
        """Make one more socket for the same core, to be connected and closed by the caller."""
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        # A core that is gone does not return; but "never" (-1) would drop its unread frames.
        socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        introduce(socket)
        return socket

    def send(self, multiparts: Iterable[Sequence[Frame]]) -> None:
        """Send messages, each a list of frames; they are dropped if the connection is lost."""
        for first, *others in multiparts:
            try:
                self.socket.send(first, zmq.NOBLOCK | (zmq.SNDMORE if others else 0))
            except zmq.Again:  # as the monitor reports
                return
            for i, frame in enumerate(others, start=1):
                self.socket.send(frame, zmq.SNDMORE if i < len(others) else 0, copy=False)

    def receive(self) -> list[Any] | None:
        """The frames of the next message; None: none has arrived."""
        try:
            return receive(self.socket)
        except zmq.ZMQError:
            return None

    def wait_until_lost(self, seconds: float) -> None:
        """Return once zmq has noticed the end of the connection, or after `seconds`."""
        self.monitor.poll(int(1000 * seconds))

    def why_lost(self) -> str:
        """Why the connection has ended: the first event that zmq has reported."""
        words = "its connection is lost"
        if self.monitor.poll(0):
            words = self._losses[recv_monitor_message(self.monitor)["event"]]
        return words

    def close(self) -> None:
        """End it; sent messages have a moment to go out."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()
        self._context.term()
        self._on_close()
