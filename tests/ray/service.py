"""A real service on Ray, as its users make it, and what is measured when a part of it dies."""

import asyncio
import contextlib
import os
import time
from pathlib import Path

import ray

from rollout_engine import LLM, AsyncLLM
from tests.faults.replica_deaths import PARAMS, PROMPTS, read, said
from tests.ray.running import actors, groups, lives, settle

OPTIONS = dict(num_kv_blocks=2048, max_num_seqs=64, num_threads=1, skip_tokenizer_init=True, log_stats=False)
_PATIENCE = 180


def truth(checkpoint, weights=None):
    """What one engine alone says to all requests, under the checkpoint's weights or others."""
    params = [each.clone(output_kind="final_only", detokenize=False) for each in PARAMS]
    with LLM(checkpoint, **OPTIONS) as llm:
        if weights is not None:
            llm.update_weights(weights)
        return [said(output.outputs) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


async def read_all(engine, at_output=lambda: None):
    """All requests at once, each to its end."""
    return await asyncio.gather(*(read(engine, i, at_output) for i in range(len(PROMPTS))))


async def all_serve(engine):
    """Wait until every replica that was not scaled away serves."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        found = await engine.replicas()
        if all(replica.state in ("SYNCED", "DEAD") for replica in found):
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(found)


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
    directory = client._updates.policy.directory
    copies = [copy.directory for copy in client._supervisor._provider._stores._copies.values() if copy.directory]
    return ([] if directory is None else [str(directory)]) + copies


@contextlib.contextmanager
def noted_losses(client):
    """Yields a list of (replica, time) of each loss of a replica that the client notes in the block."""
    losses, lost = [], client.handle_loss

    def note(member, error):
        losses.append((member.index, time.monotonic()))
        lost(member, error)

    client.handle_loss = note
    try:
        yield losses
    finally:
        client.handle_loss = lost


async def noted(losses, index):
    """Wait for the loss of this replica; no other one is lost."""
    while not losses:
        await asyncio.sleep(0.005)
    assert [lost for lost, _ in losses] == [index]


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
