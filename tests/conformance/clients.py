"""Every kind of `EngineClient`: what any of them does, all do. A new kind gets a line in `CLIENTS`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from rollout_engine.engine.local_client import LocalClient
from rollout_engine.process.process_client import ProcessClient


@contextmanager
def started(start, *args) -> Iterator:
    """A client that ends with the block."""
    client = start(*args)
    try:
        yield client
    finally:
        client.shutdown()


@contextmanager
def connected(config) -> Iterator[ProcessClient]:
    """The second client of a core."""
    with started(ProcessClient.start, config) as owner, started(ProcessClient.connect, owner.address) as client:
        yield client


CLIENTS = {
    "turned by its caller": partial(started, LocalClient.start),
    "own thread": partial(started, partial(LocalClient.start, own_thread=True)),
    "own process": partial(started, ProcessClient.start),
    "connected": connected,
}
"""Name -> a context manager of a client of a new engine: `CLIENTS[name](config)`."""
