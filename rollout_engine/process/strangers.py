"""Connections to a core's socket that no client has shown to be its own: bounded, since each takes a descriptor.

zmq accepts every connection, drops unproven ones only after half a minute, and ends the process when it
finds no descriptor. So its events are read here, and of too many strangers the oldest are closed. While its events are
not read, zmq accepts some thousand connections more, and then waits.
"""

import logging
import os
import socket
import struct
from contextlib import suppress
from typing import Any

import zmq

from rollout_engine.children.values import Frame

logger = logging.getLogger("rollout_engine")

GREETING = b"signs of life"
"""Bytes by which a client identifies itself over a connection that carries no messages."""
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_EVENT = struct.Struct("=HI")
"""Kind, and the connection's descriptor."""
_QUIET_MS = 20
_Identity = tuple[int, int]
"""Device and inode of an open socket, by which it differs from a later one with its number."""


class Strangers:
    """Counts the strangers of one socket. The thread of that socket calls it, after the socket is bound."""

    def __init__(self, context: zmq.Context[Any], router: zmq.Socket[bytes], max_strangers: int) -> None:
        self._router, self._max_strangers = router, max_strangers
        self._waiting: dict[int, _Identity] = {}
        """Descriptor of each stranger's connection, the oldest first."""
        self.num_closed = 0
        """How many were closed because there were too many."""
        endpoint = f"inproc://strangers-{id(self)}"
        router.monitor(endpoint, _EVENTS)
        self.socket = context.socket(zmq.PAIR)
        """Readable when `look` has something to do."""
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 1)  # and the other end's thousand, then zmq accepts no more
        self.socket.connect(endpoint)

    def look(self) -> None:
        """Take the connections and ends of connections in, and close the oldest of too many strangers."""
        while self.socket.poll(0):
            kind, descriptor = _EVENT.unpack(self.socket.recv_multipart()[0])
            self._waiting.pop(descriptor, None)
            if kind == zmq.EVENT_ACCEPTED:
                with suppress(OSError):  # it has ended, as a later event reports
                    self._waiting[descriptor] = _identity(descriptor)
        while len(self._waiting) > self._max_strangers:
            descriptor = next(iter(self._waiting))
            _shut_down(descriptor, self._waiting.pop(descriptor))
            if not self.num_closed:
                what = "connections that no client has shown to be its own"
                logger.warning("more than %d %s: from now on the oldest are closed", self._max_strangers, what)
            self.num_closed += 1

    def greet(self, frame: Frame) -> None:
        """Note that the connection by which a frame has arrived is a client's."""
        self.look()  # so that it was taken in before
        assert isinstance(frame, memoryview), "as `receive` gives it"
        self._waiting.pop(int(frame.obj.get(zmq.SRCFD)), None)  # type: ignore[attr-defined]

    def close(self) -> None:
        """End; the router is not bound any more."""
        while self.socket.poll(_QUIET_MS):  # zmq's thread may wait for room, which would keep the router from closing
            self.socket.recv_multipart()
        self._router.disable_monitor()
        self.socket.close()


def _identity(descriptor: int) -> _Identity:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _shut_down(descriptor: int, identity: _Identity) -> None:
    """End a connection of zmq's, which closes it then: unless it has closed it, and the number is another's by now."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        if _identity(copy.fileno()) == identity:
            copy.shutdown(socket.SHUT_RDWR)
