"""File descriptors: zmq ends the process that has none left, so descriptors are counted before zmq is called.

A core raises its own limit at start and writes into its directory how many clients it has descriptors for. A client
takes a place there before it connects: the lock of a file, which goes with its process.
"""

import fcntl
import os
import random
import resource
from pathlib import Path
from typing import NamedTuple

from rollout_engine.base.errors import ConfigError, RetryableError
from sync.shared_files import try_lock

MAX_CLIENTS = 1024
"""Most clients of a core, if it has enough descriptors for them."""
CLIENT_DESCRIPTORS = 24
"""Descriptors that a client opens, 14 or over TCP some more, and a few for others that open some at the same time."""
CORE_DESCRIPTORS = 40
"""Descriptors that the parent of a core opens for it, its client included."""
MAX_STRANGERS = 2048
"""Most connections to a core that no client has shown to be its own."""
_RESERVE = 64
"""Descriptors that a core reserves for files and for weights in transfer, not for connections."""
_ENOUGH = 1 << 16
"""Limit that no core needs to exceed."""


def raise_limit() -> None:
    """Raise this process's limit of descriptors as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Connections(NamedTuple):
    """How many connections a core takes."""

    num_clients: int
    num_strangers: int
    """Connections at the same time that no client has shown to be its own."""


MOST_CONNECTIONS = Connections(MAX_CLIENTS, MAX_STRANGERS)


def connections_possible(num_connections: int = 1) -> Connections:
    """The clients, of `num_connections` each, and strangers that this process has descriptors for.

    Raises `ConfigError` if there are none for a client.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _ENOUGH if soft == resource.RLIM_INFINITY else soft
    used = len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"))
    free = limit - used - _RESERVE
    num_strangers = min(free // 4, MAX_STRANGERS)
    num_clients = (free - num_strangers) // num_connections
    if num_clients < 1:
        what = (
            f"a core has {limit} file descriptors, uses {used} of them and keeps {_RESERVE}: none is left for a client"
        )
        raise ConfigError(f"{what}. Raise the hard limit (ulimit -Hn).")
    return Connections(min(num_clients, MAX_CLIENTS), num_strangers)


def require(count: int, what: str) -> None:
    """Raise `RetryableError`, naming `what` needs them, unless this process may open `count` more descriptors."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as problem:
        left = f"{what} takes up to {count} file descriptors, and this process can open {len(opened)} more"
        advice = "Raise the limit (ulimit -n, or resource.setrlimit), or close files or engines"
        raise RetryableError(f"{left} ({problem.strerror}). {advice}.") from None
    finally:
        for descriptor in opened:
            os.close(descriptor)


def write_places(directory: str | Path, count: int) -> None:
    """Offer `count` places to the clients of the core in `directory`."""
    Path(directory, "places").write_text(str(count))


def take_place(directory: str | Path) -> int | None:
    """Take a place at the core in `directory`: a descriptor for `leave_place`. None if it does not count them.

    Raises `RetryableError` if all are taken.
    """
    try:
        count = int(Path(directory, "places").read_text())
    except FileNotFoundError:
        return None
    first = random.randrange(count)
    for number in (*range(first, count), *range(first)):
        place = os.open(Path(directory, f"place-{number}"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if try_lock(place):
            return place
        os.close(place)
    what = f"The core in {directory} has {count} clients, as many as its file descriptors allow"
    raise RetryableError(f"{what}. Wait until one leaves, share a client, or raise the core's hard limit (ulimit -Hn).")


def leave_place(place: int) -> None:
    """Give a place back, also if a forked child holds a copy of the descriptor."""
    fcntl.flock(place, fcntl.LOCK_UN)
    os.close(place)
