"""Nothing may be left behind: no request, block or reference in a core; no process, thread, descriptor or file here."""

import asyncio
import gc
import os
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import zmq
from zmq.utils import garbage

from rollout_engine import AsyncLLM
from rollout_engine.children.process import start_process

_SECONDS = 60.0
"""How long what has ended may take to go away."""


async def assert_clean(engine: AsyncLLM) -> None:
    """AssertionError, saying what, if a core that should be idle and running holds anything."""
    deadline = time.monotonic() + _SECONDS
    while await engine.get_num_unfinished_requests() and time.monotonic() < deadline:
        await asyncio.sleep(0.005)
    assert await engine.get_num_unfinished_requests() == 0, "requests are left in the core"
    assert len(engine.frontend.streams) == 0, "streams are left in the client"
    assert await engine.get_cache_usage() == 0.0, "KV blocks are left"
    await engine.check_integrity()
    assert not await engine.is_paused() and not await engine.is_sleeping()
    assert (await engine.get_metrics()).core.state == "RUNNING"


class Leftovers:
    """What this process and its children hold, compared with how it was when this was made; and engines' files."""

    def __init__(self) -> None:
        _start_collector()
        start_process(["true"]).wait()  # its thread stays with the process
        self._before = _held()

    def assert_none(self, *addresses: str) -> None:
        """AssertionError if there is more than before, or anything of engines that were at `addresses`.

        What is about to go away is given some seconds.
        """
        deadline = time.monotonic() + _SECONDS
        while (more := self._more() | _files(addresses)) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.02)
        assert not more, more

    def _more(self) -> dict[str, object]:
        now = _held()
        return {name: now[name] - held for name, held in self._before.items() if now[name] - held}


def _held() -> dict[str, Counter[str]]:
    """Descriptors are known by what they are open on: numbers are used again."""
    return {
        "processes": Counter(str(child.pid) for child in psutil.Process().children(recursive=True)),
        "threads": Counter(thread.name for thread in threading.enumerate()),
        "descriptors": Counter(_target(number) for number in os.listdir("/proc/self/fd")),
        "buffers that pyzmq has yet to send": Counter(sent=len(garbage.gc.refs)),
    }


def _files(addresses: tuple[str, ...]) -> dict[str, object]:
    folders = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    names = [Path(address).name for address in addresses]
    return {str(path): "left" for folder in folders for name in names for path in folder.glob(f"*{name}*")}


def _target(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return f"/proc/{os.getpid()}/fd"  # it was the listing's own


def _start_collector() -> None:
    """pyzmq's thread that lets go of buffers sent without a copy starts with the first, and stays with the process."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://leftovers")
        theirs.connect("inproc://leftovers")
        theirs.send(bytes(2 * zmq.COPY_THRESHOLD), copy=False)
        ours.recv()
