"""What zmq and the system's sockets offer, between tasks: the wire of a simulated core and its clients.

    DEALER ──> link, in order, each message after a delay ──> ROUTER
           <──                                           <──

A link never reorders or loses a message while it stands. Closed in order it still delivers what was sent; cut, as by
the death of a process, it drops what is under way. While it is held, as by a network that is partitioned, nothing
arrives. A full link refuses the router's messages, as a pipe does.
"""

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from tests.simulation.scheduler import Scheduler

_DELAYS = (0.0, 0.0, 0.0, 0.0005, 0.02)
"""Seconds that a message may take; the first is the plain choice."""
_MAX_QUEUED = 64
"""Messages on their way to a client before the router's sends are refused."""


class _Frame:
    """A received frame, as `recv(copy=False)` returns it."""

    def __init__(self, data: bytes) -> None:
        self.bytes, self.buffer = data, memoryview(bytearray(data))


class _Pipe:
    """One direction of a link."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._messages: deque[tuple[float, list[bytes]]] = deque()
        self._last = self._held_until = 0.0

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, frames: list[bytes]) -> None:
        arrives = max(self._scheduler.clock.now, self._held_until) + self._scheduler.choices.pick(_DELAYS)
        self._last = max(self._last, arrives)
        self._messages.append((self._last, frames))
        self._scheduler.add_alarm(self._last)

    def hold(self, until: float) -> None:
        """Let nothing arrive before."""
        self._held_until = until
        self._scheduler.add_alarm(until)

    @property
    def has_arrived(self) -> bool:
        now = self._scheduler.clock.now
        return bool(self._messages) and self._messages[0][0] <= now and self._held_until <= now

    @property
    def has_all_arrived(self) -> bool:
        return max(self._last, self._held_until) <= self._scheduler.clock.now

    def get(self) -> list[bytes]:
        return self._messages.popleft()[1]

    def drop(self) -> None:
        self._messages.clear()
        self._last = self._held_until = 0.0


class _Link:
    """A connection of a client to a router."""

    def __init__(self, scheduler: Scheduler, identity: bytes) -> None:
        self.identity = identity
        self.to_core, self.to_client = _Pipe(scheduler), _Pipe(scheduler)
        self.is_open = True

    def close(self) -> None:
        """End it; what was sent before still arrives."""
        self.is_open = False

    def cut(self) -> None:
        """End it, and drop what is under way."""
        self.is_open = False
        self.to_core.drop()
        self.to_client.drop()


class SimulatedTransport:
    """Stands for the module `zmq`; names that it lacks are zmq's own."""

    def __init__(self, scheduler: Scheduler, before_socket: Callable[[], object]) -> None:
        """`before_socket` may raise what opening a descriptor raises where none is left."""
        self._scheduler, self._before_socket = scheduler, before_socket
        self.routers: dict[str, _Router] = {}
        self._numbers = itertools.count(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(zmq, name)

    def Context(self, io_threads: int = 1) -> Any:
        return self

    def socket(self, kind: int) -> Any:
        return _Router(self, self._scheduler) if kind == zmq.ROUTER else _Dealer(self, self._scheduler)

    def term(self) -> None:
        """End the context: its sockets are closed."""

    def Poller(self) -> Any:
        return _Poller(self._scheduler)

    def Waker(self) -> Any:
        self._before_socket()
        return SimulatedWaker(self._scheduler)

    def links_of(self, address: str) -> "list[_Link]":
        """The connections of a core, the first one first."""
        router = self.routers.get(address)
        return [] if router is None else list(router.links.values())

    def cut_off(self, address: str) -> None:
        """Cut every link of a core, whose process is gone."""
        for link in self.links_of(address):
            link.cut()
        self.routers.pop(address, None)

    def next_identity(self) -> bytes:
        return next(self._numbers).to_bytes(5, "big")


class _Socket:
    def __init__(self, transport: SimulatedTransport, scheduler: Scheduler) -> None:
        self.transport, self.scheduler = transport, scheduler
        self._parts: list[bytes] = []
        self._unread: list[_Frame] = []

    def setsockopt(self, option: int, value: Any) -> None:
        """Options are zmq's business."""

    def send(self, frame: Any, flags: int = 0, copy: bool = True) -> None:
        """Send a part; the message goes with its last one."""
        if not self._parts:
            self._begin(bytes(frame))
        self._parts.append(bytes(frame))
        if not flags & zmq.SNDMORE:
            parts, self._parts = self._parts, []
            self._put(parts)
            self.scheduler.pause()

    def send_multipart(self, frames: list[Any], flags: int = 0, copy: bool = True) -> None:
        for frame in frames[:-1]:
            self.send(frame, zmq.SNDMORE | flags)
        self.send(frames[-1], flags)

    def getsockopt(self, option: int) -> int:
        """Whether more frames follow of the message that is being read: the one option that is asked for."""
        assert option == zmq.RCVMORE, option
        return int(bool(self._unread))

    def recv(self, flags: int = 0, copy: bool = True) -> _Frame:
        """The next frame of the message that is being read, or of the next one. Raises `zmq.Again` without one."""
        if not self._unread:
            if not self.is_readable():
                raise zmq.Again
            self._unread = [_Frame(part) for part in self._get()]
        return self._unread.pop(0)

    def _begin(self, first: bytes) -> None:
        """Raise where a message that begins so cannot be sent."""

    def _put(self, parts: list[bytes]) -> None: ...

    def _get(self) -> list[bytes]: ...

    def is_readable(self) -> bool: ...


class _Router(_Socket):
    """The core's end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.links: dict[bytes, _Link] = {}
        self._address = ""

    def bind(self, address: str) -> None:
        self._address = address
        self.transport.routers[address] = self

    def unbind(self, address: str) -> None:
        """Let no further client connect; those that have stay."""
        self.transport.routers.pop(address, None)

    def is_readable(self) -> bool:
        return any(link.to_core.has_arrived for link in self.links.values())

    def close(self) -> None:
        self.transport.routers.pop(self._address, None)
        for link in self.links.values():
            link.close()

    def _begin(self, first: bytes) -> None:
        link = self.links.get(first)
        if link is None or not link.is_open:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if len(link.to_client) >= _MAX_QUEUED or self.scheduler.choices.chance(0.02):
            raise zmq.Again

    def _put(self, parts: list[bytes]) -> None:
        if self.links[parts[0]].is_open:
            self.links[parts[0]].to_client.put(parts[1:])

    def _get(self) -> list[bytes]:
        link = self.scheduler.choices.pick([link for link in self.links.values() if link.to_core.has_arrived])
        return [link.identity, *link.to_core.get()]


class _Dealer(_Socket):
    """A client's end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.link = _Link(self.scheduler, self.transport.next_identity())
        self._monitor = _Monitor(self)

    def get_monitor_socket(self, events: int) -> Any:
        return self._monitor

    def disable_monitor(self) -> None:
        """Nobody looks at it any more."""

    def connect(self, address: str) -> None:
        router = self.transport.routers.get(address)
        if router is None:
            self.link.is_open = False
        else:
            router.links[self.link.identity] = self.link

    def is_readable(self) -> bool:
        return self.link.to_client.has_arrived

    def close(self) -> None:
        self.link.close()
        self.link.to_client.drop()

    def _put(self, parts: list[bytes]) -> None:
        if self.link.is_open:
            self.link.to_core.put(parts)

    def _get(self) -> list[bytes]:
        return self.link.to_client.get()


class _Monitor:
    """Becomes readable when the link has ended and all that came over it has arrived at the socket."""

    def __init__(self, dealer: _Dealer) -> None:
        self._dealer = dealer
        self._is_taken = False

    def take(self) -> dict[str, int]:
        """The event: the connection is lost."""
        self._is_taken = True
        return {"event": zmq.EVENT_DISCONNECTED}

    def is_readable(self) -> bool:
        link = self._dealer.link
        return not self._is_taken and not link.is_open and link.to_client.has_all_arrived

    def poll(self, timeout_ms: float) -> bool:
        scheduler = self._dealer.scheduler
        return scheduler.wait(self.is_readable, scheduler.clock.now + timeout_ms / 1000, "a lost connection")

    def close(self) -> None:
        """Nobody looks at it any more."""


class SimulatedWaker:
    """A `rollout_engine.process.waker.Waker`, and any descriptor that becomes readable once."""

    _numbers = itertools.count(1000)

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._number = scheduler, next(self._numbers)
        self._is_set = False

    def fileno(self) -> int:
        return self._number

    def is_readable(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def wake(self) -> None:
        self.set()
        self._scheduler.pause()

    def drain(self) -> None:
        self._is_set = False

    def close(self) -> None:
        """Nobody looks at it any more."""


class _Poller:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._sources: dict[Any, int] = {}

    def register(self, source: Any, flags: int = zmq.POLLIN) -> None:
        self._sources[source] = flags

    def unregister(self, source: Any) -> None:
        del self._sources[source]

    def poll(self, timeout_ms: float | None = None) -> list[tuple[Any, int]]:
        deadline = None if timeout_ms is None or timeout_ms < 0 else self._scheduler.clock.now + timeout_ms / 1000
        self._scheduler.wait(lambda: any(self._readable()), deadline, "messages")
        return [(source.fileno() if hasattr(source, "fileno") else source, zmq.POLLIN) for source in self._readable()]

    def _readable(self) -> list[Any]:
        return [source for source, flags in self._sources.items() if flags and source.is_readable()]
