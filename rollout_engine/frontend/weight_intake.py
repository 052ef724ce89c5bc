"""The weight updates of a core's process: one at a time, each on a thread of its own, committed between two steps."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import msgspec
from torch import Tensor

from rollout_engine.core.engine_core import EngineCore
from rollout_engine.errors import DrainTimeoutError, LifecycleError, as_weight_errors
from rollout_engine.execution.executor import InlineExecutor
from rollout_engine.execution.weight_update import apply_update, update_from_source
from rollout_engine.frontend.background import run_in_background
from rollout_engine.frontend.core_io import Do, Hold
from rollout_engine.frontend.weight_ends import Meeting
from rollout_engine.messages import EngineCoreOutputs, KvMode, UpdateMode, UpdateOptions
from rollout_engine.outputs import UpdateReport
from sync.base import WeightReceiver
from sync.errors import TransferTimeout
from sync.looks import Arrival
from sync.manifest import WeightManifest
from sync.source import NamedTensor

_POLL_SECONDS = 0.005
_Answer = TypeVar("_Answer")
_Inbox = queue.SimpleQueue[Hold | Do]


class WeightIntake:
    """Called by the busy loop, whose `inbox` it uses to have things done between two steps.

    Args:
        deliver: takes ends that no step brought.
    """

    def __init__(
        self,
        core: EngineCore,
        executor: InlineExecutor,
        inbox: _Inbox,
        deliver: Callable[[EngineCoreOutputs], None],
    ) -> None:
        self._core, self._executor, self._inbox, self._deliver = core, executor, inbox, deliver
        self._last: dict[int, _Update] = {}
        """By client."""
        self._receiver: tuple[Meeting, WeightReceiver] | None = None
        """Of the last update: its memory stays mapped, its group joined."""

    def begin(
        self, client_index: int, manifest: WeightManifest, meeting: Meeting, options: UpdateOptions
    ) -> Future[bool]:
        """Open an update. True: it is accepted and its tensors are awaited. False: these weights are live already.

        Raises `LifecycleError` when one is open, or the weights are not there.
        """

        def apply(update: _Update) -> UpdateReport:
            with as_weight_errors():
                receiver = self._connected(meeting)
            try:
                update.attach(receiver)
                announced = _Announced(receiver, update.accepted)
                steps = self._steps(options.kv, update)
                return apply_update(self._executor.updater, manifest, announced, steps, options, update.check)
            except BaseException:
                self._receiver = None
                receiver.close()
                raise

        return self._start(client_index, options, apply).accepted

    def load(self, client_index: int, path: str, version: int | None, options: UpdateOptions) -> Future[UpdateReport]:
        """One whole update from a path that this process can read."""

        def apply(update: _Update) -> UpdateReport:
            steps = self._steps(options.kv, update)
            return update_from_source(self._executor.updater, path, steps, options, version, update.check)

        return self._start(client_index, options, apply).report

    def report(self, client_index: int) -> Future[UpdateReport]:
        """Of this client's last update."""
        if client_index not in self._last:
            raise LifecycleError("end_weight_update: this client has begun no update.")
        return self._last[client_index].report

    def call_off(self, client_index: int) -> None:
        """This client gives up its update, unless it has been committed."""
        if client_index in self._last:
            self._last[client_index].call_off()

    def leave(self, client_index: int) -> None:
        """This client is gone."""
        self.call_off(client_index)
        self._last.pop(client_index, None)

    def _start(
        self, client_index: int, options: UpdateOptions, apply: "Callable[[_Update], UpdateReport]"
    ) -> "_Update":
        UpdateOptions.checked(**msgspec.structs.asdict(options))
        self._core.begin_update()
        count = self._core.stats.updates.count
        self._last[client_index] = _Update(lambda update: count(partial(apply, update)), self._end)
        return self._last[client_index]

    def _end(self) -> None:
        """On the update's thread: the busy loop closes the update before its report is told."""
        _done(self._inbox, lambda: self._core.end_update(dirty=self._executor.updater.dirty))

    def _steps(self, kv: KvMode, update: "_Update") -> "_Steps":
        return _Steps(self._core, self._inbox, self._deliver, kv, update.check)

    def _connected(self, meeting: Meeting) -> WeightReceiver:
        if self._receiver is None or self._receiver[0] != meeting:
            if self._receiver is not None:
                self._receiver[1].close()
            self._receiver = meeting, meeting.make_receiver()
        return self._receiver[1]


class _Update:
    """One update on its thread. `end` is called there when it is over, before `report` resolves."""

    def __init__(self, apply: "Callable[[_Update], UpdateReport]", end: Callable[[], None]) -> None:
        self.accepted: Future[bool] = Future()
        self.report: Future[UpdateReport] = Future()
        self._called_off = threading.Event()
        self._receiver: WeightReceiver | None = None
        self._apply, self._end = apply, end
        run_in_background(self._run, name="weight-update")

    def attach(self, receiver: WeightReceiver) -> None:
        """`call_off` is to close this one, which somebody may wait for. Raises as `check`."""
        self._receiver = receiver
        self.check()

    def check(self) -> None:
        """Raise `TransferTimeout` once it is called off."""
        if self._called_off.is_set():
            raise TransferTimeout("The client left, or gave up, before the update was complete.")

    def call_off(self) -> None:
        """End it, from another thread, unless it has been committed."""
        self._called_off.set()
        if self._receiver is not None and not self.report.done():
            self._receiver.close()

    def _run(self) -> None:
        try:
            report = self._apply(self)
        except Exception as problem:
            error: Exception | None = problem
        else:
            error = None
        self._end()
        if error is not None:
            self.report.set_exception(error)
        else:
            self.report.set_result(report)
        if not self.accepted.done():
            self.accepted.set_result(False) if error is None else self.accepted.set_exception(error)


class _Announced(WeightReceiver):
    """A receiver that says so when it is asked for a manifest's tensors: the manifest has been accepted."""

    def __init__(self, receiver: WeightReceiver, accepted: Future[bool]) -> None:
        self._receiver, self._accepted = receiver, accepted

    def receive(self, manifest: WeightManifest) -> Iterator[NamedTensor]:
        """As `WeightReceiver.receive`."""
        self._accepted.set_result(True)
        return self._receiver.receive(manifest)

    def receive_into(self, shadow: Mapping[str, Tensor], manifest: WeightManifest) -> dict[str, Arrival]:
        """As `WeightReceiver.receive_into`."""
        self._accepted.set_result(True)
        return self._receiver.receive_into(shadow, manifest)

    def close(self) -> None:
        """As `WeightReceiver.close`."""
        self._receiver.close()


class _Steps:
    """The busy loop's steps, for one update on another thread; `check` is what ends a wait for them."""

    def __init__(
        self,
        core: EngineCore,
        inbox: _Inbox,
        deliver: Callable[[EngineCoreOutputs], None],
        kv: KvMode,
        check: Callable[[], None],
    ) -> None:
        self._core, self._inbox, self._deliver, self._kv, self._check = core, inbox, deliver, kv, check

    def boundary(self) -> Hold:
        return Hold(self._inbox)

    def settle(self, mode: UpdateMode, deadline: float) -> None:
        if mode == "keep":
            return
        _done(self._inbox, lambda: self._deliver(self._core.close_for_update(mode)))
        unfinished = partial(self._core.num_draining, "update_weights")
        while mode == "wait" and (num_in_flight := _done(self._inbox, unfinished)):
            self._check()
            if time.monotonic() > deadline:
                what = f"{num_in_flight} requests are still in flight at the end of the time given"
                raise DrainTimeoutError(f"update_weights: {what}; they go on.")
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        self._core.lifecycle.stop_for_update()

    def advance(self, version: int) -> int:
        return self._core.commit_version(version, self._kv)


def _done(inbox: _Inbox, action: Callable[[], _Answer]) -> _Answer:
    """What `action` gives on the busy loop, between two steps."""
    answer: Future[_Answer] = Future()

    def act() -> None:
        try:
            answer.set_result(action())
        except Exception as problem:
            answer.set_exception(problem)

    inbox.put(Do(act))
    return answer.result()
