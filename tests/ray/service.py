"""A real service on Ray, as its users make it, and what is measured when a part of it dies."""

import contextlib
import os
import time
from pathlib import Path

import ray

from rollout_engine import AsyncLLM
from tests.faults.fleet_requests import OPTIONS
from tests.ray.running import actors, groups, lives, settle


@contextlib.contextmanager
def service(config, **options):
    """`AsyncLLM` over replicas on Ray. Afterwards nothing of it is left."""
    was_connected = ray.is_initialized()
    engine = AsyncLLM(config.model, placement="ray", **(OPTIONS | options))
    client = engine.frontend.client
    pids = {replica.pid for replica in client.replicas() if replica.pid}
    with engine:
        yield engine
        pids |= {replica.pid for replica in client.replicas() if replica.pid}
        left = [Path(path) for path in published(engine)]
        left += [Path(member.client.address) for member in client._members.values()]
    for pid in pids:
        settle(lambda pid=pid: not lives(pid), f"core {pid} is gone")
    settle(lambda: not any(path.exists() for path in left), f"{left} are gone")
    settle(lambda: not [path for each in left for path in Path("/dev/shm").glob(f"{each.name}*")], "memory is free")
    if was_connected:
        settle(lambda: not actors("ALIVE") and not groups("CREATED"), "neither actor nor placement group is left")
    assert ray.is_initialized() == was_connected


def published(engine):
    """Directories in which the newest weights are published: here, and on each other node."""
    client = engine.frontend.client
    directory = client._updates._directory
    copies = [copy.directory for copy in client._supervisor._provider._stores._copies.values() if copy.directory]
    return ([] if directory is None else [str(directory.path)]) + copies


@contextlib.contextmanager
def noted_losses(client):
    """Yields a list of (replica, time) of each loss of a replica that the client notes in the block."""
    losses, lost = [], client.lost

    def note(member, error):
        losses.append((member.index, time.monotonic()))
        lost(member, error)

    client.lost = note
    try:
        yield losses
    finally:
        client.lost = lost


def at_output(number, act):
    """A function that calls `act` when it is called for the `number`th time."""
    left = number

    def changed():
        nonlocal left
        left -= 1
        if left == 0:
            act()

    return changed


def signalled(pid, number, times):
    """A function that sends a process a signal, and notes when in `times`."""

    def act():
        times.append(time.monotonic())
        os.kill(pid, number)

    return act


@contextlib.contextmanager
def timed_starts(client):
    """Yields a list of the seconds that each start of a replica takes in the block."""
    provider, seconds = client._supervisor._provider, []
    start = provider.start

    def timed(index, config):
        begun = time.monotonic()
        replica = start(index, config)
        seconds.append(time.monotonic() - begun)
        return replica

    provider.start = timed
    try:
        yield seconds
    finally:
        provider.start = start
