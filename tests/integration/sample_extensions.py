"""Worker extensions of a user, for the tests: found by name in any process that has this folder on its path."""

import builtins
import os
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from sync.manifest import WeightManifest, describe_all
from worker_ext.base import WorkerExtension, rpc


class Range(msgspec.Struct):
    start: int
    stop: int


def refuse_thread(thread):
    raise RuntimeError("can't start new thread")


def endless_pieces(moved):
    thread = threading.get_ident()
    while True:
        if threading.get_ident() != thread:
            Path(moved).touch()
        yield {}


class Sample(WorkerExtension):
    def __init__(self, worker):
        super().__init__(worker)
        self.calls = 0

    @rpc
    def double_weights(self) -> None:
        """An update past every engine's and fleet's `update_weights`."""
        update, live = self.worker.update, self.worker.live_weights()
        doubled = {name: tensor * 2 for name, tensor in live.items()}
        version = self._driver.core.policy_version + 1
        update.begin(WeightManifest.of(version, describe_all(doubled.items())), reset_version=False)
        update.stage(doubled.items())
        update.verify()
        update.commit(version, "keep")

    @rpc
    def count(self) -> int:
        self.calls += 1
        return self.calls

    @rpc
    def pid(self) -> int:
        return os.getpid()

    @rpc
    def switch_interval(self) -> float:
        return sys.getswitchinterval()

    @rpc
    def double(self, array: np.ndarray, tensor: Tensor | None = None) -> dict[str, np.ndarray | None]:
        return {"array": array * 2, "tensor": None if tensor is None else (tensor.float() * 2).numpy()}

    @rpc
    def add_in_place(self, array: np.ndarray, tensor: Tensor) -> Tensor:
        return tensor.add_(torch.from_numpy(array))

    @rpc
    def numbers(self, within: Range, step: int = 1) -> list[int]:
        return list(range(within.start, within.stop, step))

    @rpc
    def middle(self, within: Range) -> Range:
        center = (within.start + within.stop) // 2
        return Range(center, center + 1)

    @rpc
    def hold(self, gate: str) -> int:
        """Says that it has begun, by a file, and ends once there is a file called `gate`."""
        Path(f"{gate}.begun").touch()
        while not os.path.exists(gate):
            time.sleep(0.005)
        return self.count()

    @rpc
    def num_waiting_calls(self) -> int:
        """Calls that wait for a step, of all clients."""
        return len(self._driver._waiting)

    @rpc
    def num_calls_in_pieces(self) -> int:
        """Calls that have begun and have pieces left, of all clients."""
        return len(self._driver._pieces)

    @rpc
    def score_endlessly(self, moved: str) -> None:
        """Scores have no last piece from now on. One on another thread than the first makes the file `moved`."""
        self._driver.executor.score = lambda *_: endless_pieces(moved)

    @rpc
    def score_again(self) -> None:
        """Scores are computed again."""
        del self._driver.executor.score

    @rpc
    def hold_until_cancelled(self, count: int) -> None:
        """Ends once clients have sent word that so many calls are cancelled. They come behind this one."""
        while len(self._driver._wake.__self__._io.cancelled) < count:
            time.sleep(0.005)

    @rpc
    def hold_until_left(self, begun: str) -> None:
        """Says that it has begun, by a file, and ends once a client has left."""
        Path(begun).touch()
        while not self._driver._wake.__self__._io.gone:
            time.sleep(0.005)

    @rpc
    def refuse_threads(self, refused: bool) -> None:
        """Whether no thread can be started in this process."""
        self._started = getattr(self, "_started", threading.Thread.start)
        threading.Thread.start = refuse_thread if refused else self._started

    @rpc
    def break_update(self, where: str, method: str, error: str) -> None:
        """The next call of a method of the updater, core or driver raises."""
        target = {"updater": self.worker.update._updater, "core": self._driver.core, "driver": self._driver}[where]

        def fail(*_, **__):
            del vars(target)[method]
            raise getattr(builtins, error)("injected")

        vars(target)[method] = fail

    @rpc
    def waits_for_requests(self) -> bool:
        """Whether an update has closed the engine for new requests, and lets those in flight finish."""
        return self._driver.core.lifecycle.closed_for_update

    @property
    def _driver(self):
        return self.worker.update._boundary.__self__

    @rpc
    def fail(self) -> None:
        raise KeyError("of the extension")

    @rpc
    def unsendable(self) -> object:
        return self


class RankFaults(WorkerExtension):
    """Faults of ranks other than the first."""

    @rpc
    def break_weights(self, rank: int, method: str) -> None:
        """The next call of a method of what holds the weights of one rank raises."""
        if self.worker.rank != rank:
            return
        held = self.worker._held

        def fail(*_, **__):
            del vars(held)[method]
            raise MemoryError("injected")

        vars(held)[method] = fail

    @rpc
    def num_weights_elsewhere(self) -> int:
        """Weights that ranks other than the first can read."""
        return 0 if self.worker.rank == 0 else len(self.worker.live_weights())


class NoSocketThread(Sample):
    """The thread of the core's socket cannot start."""

    def __init__(self, worker):
        super().__init__(worker)
        start = threading.Thread.start
        threading.Thread.start = lambda each: refuse_thread(each) if each.name == "core-socket" else start(each)
