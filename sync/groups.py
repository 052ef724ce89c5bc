"""Forms the process group of a collective transport: apart from the trainer's own, in the background, by a deadline.

    rendezvous "file:///path/nobody/used"      one machine: no port is opened for it
    rendezvous "tcp://host:port"               several: rank 0 listens on that address, and on no other

The trainer is rank 0, workers are ranks 1 to N. Every rank makes its own group object at once and is free for other
work; `ready` says whether all have joined.
"""

import atexit
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import torch.distributed as dist

from sync.errors import SyncError, TransferTimeout
from sync.own_files import opened_file
from sync.shared_files import try_lock

_MAX_SECONDS = 1e6
NEW_ENDS = "Make a new sender and new receivers with a new rendezvous."
ProcessGroup: TypeAlias = Any
Store: TypeAlias = Any
Work: TypeAlias = Any
c10d: Any = dist
"""torch.distributed with the classes that it does not export to type checkers."""


class GroupConfig(NamedTuple):
    """One rank of a group, and how it finds the others."""

    rendezvous: str
    rank: int
    world_size: int
    timeout: float
    """Seconds: for the group to form, and for each later step."""

    def check(self) -> None:
        """Raise `SyncError` unless there can be such a rank."""
        if self.world_size < 2 or not 0 <= self.rank < self.world_size:
            what = f"rank={self.rank}, world_size={self.world_size}"
            raise SyncError(f"{what} is not allowed: the trainer is rank 0 and workers are 1 to world_size - 1.")
        check_timeout(self.timeout)


def check_timeout(timeout: float) -> None:
    """Raise `SyncError` unless something may be waited for that long."""
    if not 0 < timeout <= _MAX_SECONDS:
        raise SyncError(f"timeout={timeout} is not allowed: must be seconds, more than 0, at most {_MAX_SECONDS:g}.")


class WeightGroup:
    """A process group that forms on a thread of its own.

    Args:
        connect: makes the backend from the rendezvous store and the config; blocks until all ranks have joined.
    """

    def __init__(self, config: GroupConfig, connect: Callable[[Store, GroupConfig], ProcessGroup]) -> None:
        config.check()
        self.config = config
        self._store = _rendezvous_of(config)
        self._connect = connect
        self._group: ProcessGroup = None
        self._left: ProcessGroup = None
        """The group to close after the step in progress: closing now would wait for it."""
        self._lock, self._stepping = threading.Lock(), threading.Lock()
        self._problem: Exception | None = None
        self._deadline = time.monotonic() + config.timeout
        self._settled = threading.Event()
        """Set once the group has formed, or never will."""
        self._thread = threading.Thread(target=self._form, name="weight-group", daemon=True)
        _FORMING.add(self)
        self._thread.start()

    def ready(self) -> bool:
        """Whether all ranks have joined. Raises as `wait_for_ranks` does once it is clear that they will not."""
        if not self._settled.is_set() and time.monotonic() < self._deadline:
            return False
        self.wait_for_ranks()
        return True

    def wait_for_ranks(self) -> ProcessGroup:
        """Wait until all ranks have joined. `TransferTimeout` if they do not; `SyncError` once the group is broken."""
        self._settled.wait(max(self._deadline - time.monotonic(), 0.0) + 1.0)
        if self._group is None:
            first_line = str(self._problem).strip().partition("\n")[0] or type(self._problem).__name__
            why = f": {first_line}" if self._problem is not None else ""
            what = f"The weight group of {self.config.world_size} did not form within {self.config.timeout:g} s"
            raise TransferTimeout(f"{what}{why}. Start every rank. {NEW_ENDS}")
        if self._group is _BROKEN:
            raise SyncError(f"The weight group is broken or closed. {NEW_ENDS}")
        return self._group

    @property
    def has_left(self) -> bool:
        """Whether `leave` was called."""
        return self._group is _BROKEN

    def leave(self) -> None:
        """Close the connections; peers in the middle of a step get an error, not a wait.

        Called from another thread, it gives those who wait for the group to form an error at once; a step in progress
        ends first.
        """
        with self._lock:
            group, self._group = self._group, _BROKEN
            if group is not None and group is not _BROKEN:
                self._left = group
        self._settled.set()
        self._close_left()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Enter this around each wait for peers, so that `leave` does not close the connections during it."""
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
        """Wait until the group has formed or never will, at most for `seconds`."""
        self._thread.join(seconds)

    def _form(self) -> None:
        group: ProcessGroup = None
        try:
            store = self._store()
            self._await_all(store)
            group = self._connect(store, self.config)
        except Exception as problem:  # shown by `wait_for_ranks`, on the thread of the caller
            self._problem = problem
        with self._lock:
            earlier, self._group = self._group, self._group or group
        self._settled.set()
        if earlier is _BROKEN and group is not None:
            group.abort()
        _FORMING.discard(self)

    def _await_all(self, store: Store) -> None:
        """Wait until every rank is at the rendezvous. This wait can be ended early, a connect under way cannot."""
        store.set(f"arrived/{self.config.rank}", "")
        everybody = [f"arrived/{rank}" for rank in range(self.config.world_size)]
        while not store.check(everybody):
            if self._group is _BROKEN:
                raise SyncError("this rank left the group")
            if time.monotonic() > self._deadline:
                raise TransferTimeout("some ranks never joined")
            time.sleep(_POLL_SECONDS)


_BROKEN = object()
_POLL_SECONDS = 0.005
_FORMING: set[WeightGroup] = set()
_OPENING_STORE = threading.Lock()
"""Held from a look at a store's file to its opening: a thread that has locked the file for a look could not release
it while another one waits for it in torch, which holds the interpreter."""
_EXIT_SECONDS = 30.0
"""How long an ending process waits for connects under way. One that takes longer will not return."""


@atexit.register
def _leave_at_exit() -> None:
    """Wait for threads in torch: one that returns from it while the interpreter ends would abort the process."""
    forming = list(_FORMING)
    for group in forming:
        group.leave()
    deadline = time.monotonic() + _EXIT_SECONDS
    for group in forming:
        group.await_thread(max(deadline - time.monotonic(), 0.0))


def own_address(config: GroupConfig) -> str:
    """The local address that leads to the rendezvous; the other ranks can reach this one there."""
    address = urlsplit(config.rendezvous)
    if address.scheme == "file" or address.hostname is None:
        return "127.0.0.1"
    family, kind, protocol, _, target = socket.getaddrinfo(address.hostname, address.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # chooses a route, sends nothing
        return str(probe.getsockname()[0])


def _rendezvous_of(config: GroupConfig) -> Callable[[], Store]:
    """Parse the rendezvous; return the function that connects to it."""
    address = urlsplit(config.rendezvous)
    timeout = timedelta(seconds=config.timeout)
    if address.scheme == "file" and address.path and not address.netloc:
        return lambda: _file_store(address.path, config)
    try:
        host, port = address.hostname, address.port
    except ValueError:
        host = port = None
    if address.scheme == "tcp" and host and port:
        return lambda: _tcp_store(host, port, config, timeout)
    wanted = "file:///absolute/path (one machine) or tcp://host:port (several)"
    raise SyncError(f"rendezvous='{config.rendezvous}' is not allowed: must be {wanted}.")


def _file_store(path: str, config: GroupConfig) -> Store:
    """Connect, once no other process keeps the file locked: torch would wait for that without an end, and hold the
    interpreter meanwhile. Raises `TransferTimeout`, and `OSError` for a file that is not this user's own."""
    deadline = time.monotonic() + config.timeout
    while True:
        with _OPENING_STORE:
            is_free = False
            with contextlib.suppress(FileExistsError), opened_file(path, os.O_RDWR | os.O_CREAT) as file:
                is_free = try_lock(file)
            if is_free:
                return c10d.FileStore(path, config.world_size)
        if time.monotonic() > deadline:
            raise TransferTimeout(f"another process keeps {path} locked")
        time.sleep(_POLL_SECONDS)


def _tcp_store(host: str, port: int, config: GroupConfig, timeout: timedelta) -> Store:
    """Connect. Rank 0 makes the listening socket itself: torch's would listen on every address of the machine."""
    options: dict[str, Any] = dict(world_size=config.world_size, timeout=timeout, wait_for_workers=False)
    if config.rank:
        return c10d.TCPStore(host, port, is_master=False, **options)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family)
    return c10d.TCPStore(host, port, is_master=True, master_listen_fd=listener.detach(), **options)
