"""The steps of one engine while its weights are updated. Satisfies `rollout_engine.weights.update.StepControl`."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from rollout_engine.base.errors import DrainTimeoutError, RetryableError, TransferTimeoutError
from rollout_engine.base.messages import UpdateMode, UpdateOptions
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.base.threads import start_thread
from rollout_engine.engine.driver import EngineDriver
from rollout_engine.engine.interrupts import allowed, held


class UpdateSteps:
    """Holds steps off and drains requests for one update.

    Args:
        options: whether requests in flight keep their KV at the commit, and which model's weights are updated.
        turn: called repeatedly while requests are to finish: it computes a step, or waits a moment for one.
        check: called meanwhile; any error it raises ends the update.
    """

    def __init__(
        self,
        driver: EngineDriver,
        options: UpdateOptions,
        turn: Callable[[], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._driver, self._options, self._turn, self._check = driver, options, turn, check
        self._is_late = False
        """Whether the engine was busy with other work when the update was to continue."""

    def begin(self, deadline: float = math.inf) -> None:
        """Enter UPDATING. Raises `LifecycleError` if an update is not possible now.

        Raises `TransferTimeoutError` if other work still runs at `deadline` (`time.monotonic`).
        """
        with _in_time("begin"), self._driver.between_steps(deadline):
            self._driver.core.begin_update()
            self._updater = self._driver.executor.updater  # a shutdown may drop it meanwhile

    def end(self) -> None:
        """Leave UPDATING; on another thread, once the engine is free, if the update has waited too long for that."""
        if self._is_late:
            with suppress(RetryableError):  # no thread: better late than never
                start_thread(self._end, name="update-end")
                return
        self._end()

    def _end(self) -> None:
        with self._driver.between_steps():
            self._driver.core.end_update(dirty=self._updater.dirty)

    def run(self, update: Callable[[], UpdateReport]) -> UpdateReport:
        """Carry out the update that `begin` opened, count it, and `end` it, whatever happens."""
        try:
            with allowed():
                return self._driver.core.stats.updates.count(update)
        finally:
            self.end()

    def carry_out(self, update: Callable[[], UpdateReport], deadline: float) -> UpdateReport:
        """Do all three on this thread, with no interrupt between a step and the one that has to follow it."""
        with held():
            self.begin(deadline)
            return self.run(update)

    @contextmanager
    def boundary(self, deadline: float) -> Iterator[None]:
        """Keep steps out while inside, with none in flight.

        Raises `TransferTimeoutError`, nothing done, if that is not so at `deadline` (`time.monotonic`).
        """
        with ExitStack() as stack:
            try:
                with _in_time("commit"):
                    stack.enter_context(self._driver.boundary(deadline))
            except TransferTimeoutError:
                self._is_late = True
                raise
            yield

    def drain(self, mode: UpdateMode, deadline: float) -> None:
        """End ("abort") or finish ("wait") requests in flight, and let no new one start before the update has ended.

        Raises `DrainTimeoutError` at `deadline` (`time.monotonic`).
        """
        if mode == "keep":
            return
        core = self._driver.core
        with self._driver.between_steps():
            self._driver.deliver(core.close_for_update(mode))
        while mode == "wait":
            with self._driver.between_steps():
                num_in_flight = core.num_draining("update_weights")
            if not num_in_flight:
                return
            self._check()
            if time.monotonic() >= deadline:
                what = f"{num_in_flight} requests are still in flight at the end of the time given"
                raise DrainTimeoutError(f"update_weights: {what}; they go on.")
            self._turn()

    def stop(self) -> None:
        """Let no step begin before the update has ended. Called inside `boundary`."""
        self._driver.core.lifecycle.stop_for_update()

    def commit_version(self, version: int) -> int:
        """Make `version` the live one; returns the number of requests in flight. Called inside `boundary`."""
        if self._options.draft:
            return self._driver.core.commit_draft()
        return self._driver.core.commit_version(version, self._options.kv)


@contextmanager
def _in_time(what: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError as problem:
        text = f"update_weights: the update could not {what} in the time given: {problem}"
        raise TransferTimeoutError(f"{text}. Send the weights again, with a longer timeout.") from None
