"""Faults that this engine once had, or was found open to: each puts the faulty behaviour back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pytest import MonkeyPatch

from rollout_engine.core.engine_core import EngineCore
from rollout_engine.core.lifecycle import Lifecycle
from rollout_engine.core.request_table import RequestTable
from rollout_engine.core.scheduler import Scheduler
from rollout_engine.engine.driver import EngineDriver
from rollout_engine.engine.update_steps import UpdateSteps
from rollout_engine.engine.verb import Verb
from rollout_engine.execution import extensions

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
        driver = steps._driver
        report = driver.core.stats.updates.count(update)
        with driver.between_steps():
            driver.core.end_update(dirty=driver.executor.updater.dirty)
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
    def boundary(driver: EngineDriver) -> Iterator[None]:
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
    def close(extension: Any, _: str) -> None:
        thread = extensions.threading.Thread(target=extension.close)
        thread.start()
        thread.join()

    patch.setattr(extensions, "_close", close)


@fault("an update that a shutdown overtakes ends by an assertion")
def _update_overtaken(patch: MonkeyPatch) -> None:
    def run(steps: UpdateSteps, update: Callable[[], Any]) -> Any:
        driver = steps._driver
        try:
            return driver.core.stats.updates.count(update)
        finally:
            with driver.between_steps():
                driver.core.end_update(dirty=driver.executor.updater.dirty)

    patch.setattr(UpdateSteps, "run", run)
