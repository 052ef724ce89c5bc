"""Puts the simulation in place of threads, clocks, queues and sockets, in every module of ours that names them."""

import concurrent.futures._base
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import zmq

from rollout_engine.process.waker import Waker
from tests.simulation.scheduler import CARRIER_NAME, Scheduler
from tests.simulation.threads import (
    FutureThreading,
    SimulatedPool,
    SimulatedQueues,
    SimulatedThreading,
    SimulatedTime,
    SimulatedWait,
)

REAL: dict[str, Any] = {
    "threading": threading,
    "time": time,
    "queue": queue,
    "zmq": zmq,
    "ThreadPoolExecutor": concurrent.futures.ThreadPoolExecutor,
    "wait": concurrent.futures.wait,
    "Waker": Waker,
}
"""Names by which modules reach the system, and what they mean there."""
_PACKAGES = ("rollout_engine", "sync", "worker_ext")
_found: dict[int, list[tuple[Any, str]]] = {}


def stand_ins(scheduler: Scheduler, before_thread: Any) -> dict[str, Any]:
    """What stands for each of the real things that a core in this process uses."""
    return {
        "threading": SimulatedThreading(scheduler, before_thread),
        "time": SimulatedTime(scheduler),
        "queue": SimulatedQueues(scheduler),
        "ThreadPoolExecutor": partial(SimulatedPool, scheduler),
        "wait": SimulatedWait(scheduler),
    }


@contextmanager
def simulated(
    scheduler: Scheduler, replacements: Mapping[str, Any], others: Iterable[tuple[Any, str, Any]] = ()
) -> Iterator[None]:
    """Replace the real things of these names in all modules that are loaded, until the end of the block.

    Only tasks see the replacements: engines of other tests may have threads of their own.

    `others`: (object, name, what stands there meanwhile).
    """
    places = [(module, name, REAL[name]) for module, name in _places() if name in replacements]
    seen = {name: _ForTasks(replacement, REAL[name]) for name, replacement in replacements.items()}
    for module, name, _ in places:
        setattr(module, name, seen[name])
    for holder, name, value in others:
        places.append((holder, name, vars(holder)[name]))
        setattr(holder, name, value)
    concurrent.futures._base.threading = FutureThreading(scheduler)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        concurrent.futures._base.threading = threading  # type: ignore[attr-defined]
        for module, name, before in places:
            setattr(module, name, before)


class _ForTasks:
    """Stands for a real thing where a task asks, and is the real one for every other thread."""

    def __init__(self, replacement: Any, real: Any) -> None:
        self._replacement, self._real = replacement, real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chosen(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._chosen()(*args, **kwargs)

    def _chosen(self) -> Any:
        return self._replacement if threading.current_thread().name == CARRIER_NAME else self._real


def _places() -> list[tuple[Any, str]]:
    """(module, name) of every real thing in our modules; looked for again when more modules are loaded."""
    if len(sys.modules) not in _found:
        modules = [module for name, module in sys.modules.items() if name.split(".")[0] in _PACKAGES]
        _found[len(sys.modules)] = [
            (m, name) for m in modules for name, real in REAL.items() if vars(m).get(name) is real
        ]
    return _found[len(sys.modules)]
