"""The weight updates that clients send to a core's process: one at a time, each on a thread of its own."""

import queue
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

import numpy as np

from rollout_engine.core.engine_core import EngineCore
from rollout_engine.errors import LifecycleError
from rollout_engine.execution.executor import InlineExecutor
from rollout_engine.execution.weight_update import apply_update
from rollout_engine.frontend.core_io import Do, Hold
from rollout_engine.frontend.weight_transfer import WeightTransfer
from rollout_engine.messages import UpdateMode, UpdateOptions
from rollout_engine.outputs import UpdateReport
from sync.manifest import WeightManifest
from sync.source import NamedTensor


class WeightIntake:
    """Called by the busy loop, whose `inbox` it uses to make it hold still for a commit."""

    def __init__(self, core: EngineCore, executor: InlineExecutor, inbox: "queue.SimpleQueue[Hold | Do]") -> None:
        self._core, self._executor, self._inbox = core, executor, inbox
        self._last: WeightTransfer | None = None

    def begin(
        self, client_index: int, manifest: WeightManifest, kv: str, reset_version: bool, timeout: float
    ) -> Future[bool]:
        """Open an update. Raises `LifecycleError` when one is open, or the weights are not there."""
        options = UpdateOptions.checked(kv=kv, reset_version=reset_version, timeout=timeout)
        self._core.begin_update()
        steps = _Steps(self._core, self._inbox, kv)

        def apply(manifest: WeightManifest, tensors: Iterator[NamedTensor]) -> UpdateReport:
            update = partial(apply_update, self._executor.updater, manifest, tensors, steps, options)
            return self._core.stats.updates.count(update)

        self._last = WeightTransfer(client_index, manifest, apply, self._end, timeout)
        return self._last.begun

    def feed(self, client_index: int, data: np.ndarray) -> Future[None]:
        """The next bytes of this client's update."""
        try:
            return self._own(client_index).feed(data)
        except LifecycleError as error:
            refused: Future[None] = Future()
            refused.set_exception(error)
            return refused

    def report(self, client_index: int) -> Future[UpdateReport]:
        """Of this client's last update."""
        return self._own(client_index).report

    def leave(self, client_index: int) -> None:
        """This client sends nothing more."""
        if self._last is not None and self._last.client_index == client_index:
            self._last.cancel()

    def _own(self, client_index: int) -> WeightTransfer:
        if self._last is None or self._last.client_index != client_index:
            raise LifecycleError("weights: this client has begun no update; call begin_weight_transfer first.")
        return self._last

    def _end(self, dirty: bool | None) -> None:
        """On the transfer's thread: the busy loop closes the update before its report is told."""
        closed: Future[None] = Future()

        def close() -> None:
            self._core.end_update(dirty=dirty)
            closed.set_result(None)

        self._inbox.put(Do(close))
        closed.result()


class _Steps:
    """The busy loop's steps, for one update."""

    def __init__(self, core: EngineCore, inbox: "queue.SimpleQueue[Hold | Do]", kv: str) -> None:
        self._core, self._inbox, self._kv = core, inbox, kv

    def boundary(self) -> Hold:
        return Hold(self._inbox)

    def settle(self, mode: UpdateMode, deadline: float) -> None:
        assert mode == "keep"

    def stop(self) -> None:
        self._core.lifecycle.stop_for_update()

    def advance(self, version: int) -> int:
        return self._core.commit_version(version, self._kv)
