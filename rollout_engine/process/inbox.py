"""Messages that wait for the busy loop: each client's in order, and one client after the other.

A client whose messages are many or large fills only its own queue. While any queue is full the socket is left unread,
which holds the flood back at its source; zmq reads its clients in turn, and so does `get`.
"""

import queue
import threading
from collections import deque
from typing import Any

import msgspec

MAX_MESSAGES = 256
"""Messages of one client that may wait before no more are read."""
MAX_BYTES = 4 << 20
"""Bytes of one client's messages that may wait before no more are read."""


class FromClient(msgspec.Struct, frozen=True):
    """A message for the busy loop, and the index of the client that sent it."""

    client_index: int
    message: Any


class ClientLeft(msgspec.Struct, frozen=True):
    """A client is gone or was cut off: its requests are to be aborted."""

    client_index: int


class Wake(msgspec.Struct, frozen=True):
    """Another thread has changed the engine: the busy loop may have work now."""


class Drain(msgspec.Struct, frozen=True):
    """End the process once the requests in flight have ended, and refuse new ones."""

    reason: str


class Stop(msgspec.Struct, frozen=True):
    """End the process."""

    reason: str
    is_failure: bool = False


class _Queue:
    """Messages of one client with their sizes."""

    __slots__ = ("items", "num_bytes")

    def __init__(self) -> None:
        self.items: deque[tuple[FromClient | ClientLeft, int]] = deque()
        self.num_bytes = 0

    @property
    def is_full(self) -> bool:
        return len(self.items) >= MAX_MESSAGES or self.num_bytes >= MAX_BYTES


class Inbox:
    """A queue that takes from its clients in turn. Any thread may put items, and a signal handler urgent ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._urgent: deque[Wake | Drain | Stop] = deque()
        self._queues: dict[int, _Queue] = {}
        """Clients with messages, in the order of their turns."""
        self._full: set[int] = set()
        self._counter: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One entry for each message that waits: reentrant, as a signal handler needs it."""

    @property
    def is_full(self) -> bool:
        """Whether some client's queue is full: the socket is to be left unread."""
        return bool(self._full)

    def qsize(self) -> int:
        """Messages that wait."""
        return self._counter.qsize()

    def put(self, item: FromClient | ClientLeft, num_bytes: int = 0) -> None:
        """Append a client's message; `num_bytes` is what it counts towards the client's bound."""
        with self._lock:
            waiting = self._queues.setdefault(item.client_index, _Queue())
            waiting.items.append((item, num_bytes))
            waiting.num_bytes += num_bytes
            if waiting.is_full:
                self._full.add(item.client_index)
        self._counter.put(None)

    def put_first(self, item: Wake | Drain | Stop) -> None:
        """Put an item that is taken before any client's message. A signal handler may call it."""
        self._urgent.append(item)
        self._counter.put(None)

    def get(self, timeout: float | None = None) -> FromClient | ClientLeft | Wake | Drain | Stop:
        """Wait for a message and take it: the first of the client whose turn it is. Raises `queue.Empty`."""
        self._counter.get(timeout=timeout)
        try:
            return self._urgent.popleft()
        except IndexError:
            return self._next()

    def _next(self) -> FromClient | ClientLeft:
        with self._lock:
            client_index, waiting = next(iter(self._queues.items()))
            del self._queues[client_index]
            item, num_bytes = waiting.items.popleft()
            waiting.num_bytes -= num_bytes
            if waiting.items:
                self._queues[client_index] = waiting  # behind all others
            if not waiting.is_full:
                self._full.discard(client_index)
        return item
