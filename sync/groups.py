"""Forming the process group of a collective transport: apart from the trainer's own, in the background, by a deadline.

    rendezvous "file:///path/nobody/used"      one machine: no port is opened for it
    rendezvous "tcp://host:port"               several: rank 0 listens on that address, and on no other

The trainer is rank 0, workers are ranks 1 to N. Every rank makes its own group object at once and can go on with other
work; `ready` tells when all have come.
"""

import atexit
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import torch.distributed as dist

from sync.errors import SyncError, TransferTimeout

ProcessGroup: TypeAlias = Any
Store: TypeAlias = Any
"""torch.distributed's own, which it does not export to type checkers."""
c10d: Any = dist


class Place(NamedTuple):
    """One rank's place in a group."""

    rendezvous: str
    rank: int
    world_size: int
    timeout: float
    """Seconds: for the group to form, and for each later step."""

    def check(self) -> None:
        """`SyncError` unless there is such a place."""
        if self.world_size < 2 or not 0 <= self.rank < self.world_size:
            what = f"rank={self.rank}, world_size={self.world_size}"
            raise SyncError(f"{what} is not allowed: the trainer is rank 0 and workers are 1 to world_size - 1.")
        if not self.timeout > 0:
            raise SyncError(f"timeout={self.timeout} is not allowed: must be seconds, more than 0.")


class WeightGroup:
    """A process group that forms on a thread of its own.

    Args:
        connect: makes the backend from the rendezvous store and the place; blocks until all ranks have come.
    """

    def __init__(self, place: Place, connect: Callable[[Store, Place], ProcessGroup]) -> None:
        place.check()
        self.place = place
        self._store = _rendezvous_of(place)
        self._connect = connect
        self._group: ProcessGroup = None
        self._left: ProcessGroup = None
        """To be closed: after the step in progress, since closing would wait for it."""
        self._lock, self._stepping = threading.Lock(), threading.Lock()
        self._problem: Exception | None = None
        self._deadline = time.monotonic() + place.timeout
        self._settled = threading.Event()
        """It has formed, or never will."""
        self._thread = threading.Thread(target=self._run, name="weight-group", daemon=True)
        _FORMING.add(self)
        self._thread.start()

    def ready(self) -> bool:
        """Whether all ranks have come. Raises as `joined` once it is clear that they will not."""
        if not self._settled.is_set() and time.monotonic() < self._deadline:
            return False
        self.joined()
        return True

    def joined(self) -> ProcessGroup:
        """The group, as soon as all have come. `TransferTimeout` if they do not; `SyncError` once it is broken."""
        self._settled.wait(max(self._deadline - time.monotonic(), 0.0) + 1.0)
        if self._group is None:
            why = f": {_first_line(self._problem)}" if self._problem is not None else ""
            what = f"The weight group of {self.place.world_size} did not form within {self.place.timeout:g} s"
            raise TransferTimeout(f"{what}{why}. Start every rank, then make new ends with a new rendezvous.")
        if self._group is _BROKEN:
            raise SyncError("The weight group broke off or is closed: make new ends with a new rendezvous.")
        return self._group

    def leave(self) -> None:
        """Close the connections; peers in the middle of a step get an error, not a wait.

        From another thread: who waits for the group to form gets an error at once, a step in progress ends first.
        """
        with self._lock:
            group, self._group = self._group, _BROKEN
            if group is not None and group is not _BROKEN:
                self._left = group
        self._settled.set()
        self._close_left()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around waiting for peers."""
        try:
            with self._stepping:
                yield
        finally:
            self._close_left()

    def _close_left(self) -> None:
        if self._left is not None and self._stepping.acquire(blocking=False):
            try:
                group, self._left = self._left, None
                if group is not None:
                    with contextlib.suppress(RuntimeError):
                        group.abort()
            finally:
                self._stepping.release()

    def await_thread(self, seconds: float) -> None:
        """Until the group has formed or never will, at most for so long."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._form()
        finally:
            _FORMING.discard(self)

    def _form(self) -> None:
        try:
            store = self._store()
            self._await_all(store)
            group = self._connect(store, self.place)
        except Exception as problem:  # shown by `joined`, on the thread of the caller
            self._problem = problem
            self._settled.set()
            return
        with self._lock:
            late, self._group = self._group, self._group or group
        self._settled.set()
        if late is _BROKEN:
            group.abort()

    def _await_all(self, store: Store) -> None:
        """Until every rank has come to the rendezvous: from here on it can be left, a connect under way cannot."""
        store.set(f"here/{self.place.rank}", "")
        everybody = [f"here/{rank}" for rank in range(self.place.world_size)]
        while not store.check(everybody):
            if self._group is _BROKEN:
                raise SyncError("it was left")
            if time.monotonic() > self._deadline:
                raise TransferTimeout("some ranks never came")
            time.sleep(_POLL_SECONDS)


_BROKEN = object()
_POLL_SECONDS = 0.005
_FORMING: set[WeightGroup] = set()
_EXIT_SECONDS = 30.0
"""How long the end of a process waits for connects under way; one that peers keep waiting longer does not come back."""


@atexit.register
def _leave_at_exit() -> None:
    """A thread that comes back from torch while the interpreter ends would abort the process."""
    forming = list(_FORMING)
    for group in forming:
        group.leave()
    deadline = time.monotonic() + _EXIT_SECONDS
    for group in forming:
        group.await_thread(max(deadline - time.monotonic(), 0.0))


def own_address(place: Place) -> str:
    """The local address by which this rank reaches the rendezvous, and so the one to be reached by."""
    address = urlsplit(place.rendezvous)
    if address.scheme == "file" or address.hostname is None:
        return "127.0.0.1"
    family, kind, protocol, _, target = socket.getaddrinfo(address.hostname, address.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # chooses a route, sends nothing
        return str(probe.getsockname()[0])


def _rendezvous_of(place: Place) -> Callable[[], Store]:
    """How to reach the rendezvous; it is only parsed here."""
    address = urlsplit(place.rendezvous)
    timeout = timedelta(seconds=place.timeout)
    if address.scheme == "file" and address.path and not address.netloc:
        return lambda: c10d.FileStore(address.path, place.world_size)
    try:
        host, port = address.hostname, address.port
    except ValueError:
        host = port = None
    if address.scheme == "tcp" and host and port:
        return lambda: _tcp_store(host, port, place, timeout)
    wanted = "file:///absolute/path (one machine) or tcp://host:port (several)"
    raise SyncError(f"rendezvous='{place.rendezvous}' is not allowed: must be {wanted}.")


def _tcp_store(host: str, port: int, place: Place, timeout: timedelta) -> Store:
    """Rank 0 brings its own listening socket: torch's would listen on every address of the machine."""
    options: dict[str, Any] = dict(world_size=place.world_size, timeout=timeout, wait_for_workers=False)
    if place.rank:
        return c10d.TCPStore(host, port, is_master=False, **options)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family)
    return c10d.TCPStore(host, port, is_master=True, master_listen_fd=listener.detach(), **options)


def _first_line(problem: Exception) -> str:
    return str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
