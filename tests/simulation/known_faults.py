"""Faults that this engine once had, or was found open to: each puts the faulty behaviour back."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from pytest import MonkeyPatch

from rollout_engine.base import threads
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.core.lifecycle import Lifecycle
from rollout_engine.core.request_table import RequestTable
from rollout_engine.core.scheduler import Scheduler
from rollout_engine.engine.driver import EngineDriver
from rollout_engine.engine.update_steps import UpdateSteps
from rollout_engine.engine.verb import Verb
from rollout_engine.execution import extensions
from rollout_engine.process import weight_server
from rollout_engine.process.client_socket import ClientSocket
from rollout_engine.process.core_proc import EngineCoreProc
from rollout_engine.process.output_batcher import OutputBatcher
from rollout_engine.process.pending_calls import PendingCalls
from rollout_engine.process.pulse import PulseReader

Put = Callable[[MonkeyPatch], None]
FAULTS: dict[str, Put] = {}
"""What the engine did wrong -> puts it back."""


def fault(what: str) -> Callable[[Put], Put]:
    """Add a fault to `FAULTS`."""

    def register(put: Put) -> Put:
        FAULTS[what] = put
        return put

    return register


@fault("a call that ran is told as one that never will")
def _late_is_never(patch: MonkeyPatch) -> None:
    too_late = Verb.too_late
    patch.setattr(Verb, "too_late", lambda verb, arguments, *, begun: too_late(verb, arguments, begun=False))


@fault("a pause is answered as complete by an engine that was shut down")
def _pause_of_the_dead(patch: MonkeyPatch) -> None:
    require_alive = Lifecycle.require_alive
    excused = ("pause_generation", "sleep")
    patch.setattr(Lifecycle, "require_alive", lambda self, verb: None if verb in excused else require_alive(self, verb))


@fault("an update that fails leaves the engine UPDATING")
def _update_never_ends(patch: MonkeyPatch) -> None:
    def run(steps: UpdateSteps, update: Callable[[], Any]) -> Any:
        report = update()
        steps.end()
        return report

    patch.setattr(UpdateSteps, "run", run)


@fault("requests that came during an update or a pause are never admitted")
def _held_for_ever(patch: MonkeyPatch) -> None:
    end_update = Lifecycle.end_update
    patch.setattr(EngineCore, "end_update", lambda self, *, dirty: end_update(self.lifecycle, dirty=dirty))


@fault("KV of the old weights is used after an update that asked for it to be computed again")
def _stale_kv(patch: MonkeyPatch) -> None:
    commit = EngineCore.commit_version
    patch.setattr(EngineCore, "commit_version", lambda self, version, kv="keep": commit(self, version, "keep"))


@fault("a commit meets a step in flight")
def _commit_meets_step(patch: MonkeyPatch) -> None:
    @contextmanager
    def boundary(driver: EngineDriver, deadline: float = math.inf) -> Iterator[None]:
        with driver.between_steps():
            yield

    patch.setattr(EngineDriver, "boundary", boundary)
    patch.setattr(EngineCore, "commit_version", _commit_without_waiting)


def _commit_without_waiting(core: Any, version: int, kv: str = "keep") -> int:
    quiesce, core.quiesce = core.quiesce, lambda: None
    try:
        return _COMMIT(core, version, kv)
    finally:
        core.quiesce = quiesce


_COMMIT = EngineCore.commit_version


@fault("a sequence that was aborted ends again when its last step comes back")
def _ends_twice(patch: MonkeyPatch) -> None:
    patch.setattr(RequestTable, "live", lambda self, sequence_id: self._sequences.get(sequence_id))


@fault("the steps behind a failed one are not rolled back")
def _no_rollback(patch: MonkeyPatch) -> None:
    patch.setattr(Scheduler, "rollback", lambda self, step: None)


@fault("weights that could not be woken count as awake")
def _awake_without_weights(patch: MonkeyPatch) -> None:
    patch.setattr(Lifecycle, "undo_wake_up", lambda self, woken, level: None)


@fault("a change beside the steps wakes nobody who waits for one")
def _lost_wake_up(patch: MonkeyPatch) -> None:
    @contextmanager
    def between_steps(driver: EngineDriver) -> Iterator[None]:
        with driver.lock:
            yield

    patch.setattr(EngineDriver, "between_steps", between_steps)


@fault("an engine that shuts down where no thread can start stays half open")
def _half_open(patch: MonkeyPatch) -> None:
    def close(extension: Any, name: str) -> None:
        threads.start_thread(extension.close, name=name).join()

    patch.setattr(extensions, "_close", close)


@fault("an update whose thread cannot start leaves the engine UPDATING")
def _update_without_thread(patch: MonkeyPatch) -> None:
    def start(server: Any, client_index: int, options: Any, apply: Any) -> Any:
        update = weight_server._Update()
        steps = UpdateSteps(server._driver, options, lambda: None, update.check)
        steps.begin()
        server._last[client_index] = update
        work = partial(steps.run, partial(apply, update, steps))
        weight_server.run_in_background(update.run, work, name="weight-update")
        return update

    patch.setattr(weight_server.WeightServer, "_start", start)


@fault("a client that leaves where no thread can start ends the core")
def _leaver_ends_core(patch: MonkeyPatch) -> None:
    forget = EngineCoreProc._forget

    def forget_on_thread(proc: Any, client_index: int) -> None:
        threads.start_thread(proc._executor.caller_left, client_index, name="caller-left")
        forget(proc, client_index)

    patch.setattr(EngineCoreProc, "_forget", forget_on_thread)


@fault("the reply to a verb is sent before the outputs of what it did")
def _reply_before_outputs(patch: MonkeyPatch) -> None:
    deliver = OutputBatcher.deliver

    def hold(batcher: Any, outputs: Any) -> None:
        flush, batcher.flush = batcher.flush, lambda: None
        try:
            deliver(batcher, outputs)
        finally:
            batcher.flush = flush

    patch.setattr(OutputBatcher, "deliver", hold)


@fault("what a core sent last is lost to a client that hears of its end first")
def _last_words_lost(patch: MonkeyPatch) -> None:
    patch.setattr(ClientSocket, "_last_words", lambda self: "its process has ended")


@fault("a call that is made as the core dies is never answered")
def _unanswered(patch: MonkeyPatch) -> None:
    def fail_all(calls: Any, error: Any) -> None:
        fail(calls, error)
        calls._error = None

    fail = PendingCalls.fail_all
    patch.setattr(PendingCalls, "fail_all", fail_all)


@fault("the messages of a core do not count as its signs of life")
def _false_alarm(patch: MonkeyPatch) -> None:
    look = PulseReader.look
    patch.setattr(PulseReader, "look", lambda self, now, *, heard: look(self, now, heard=False))
