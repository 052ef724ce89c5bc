"""The client of a driver in this process: steps run on the caller's threads, or on a thread of its own."""

import gc
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rollout_engine.base import threads
from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import EngineDeadError, LifecycleError, RetryableError, WeightUpdateError, error_text
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, UpdateOptions
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.engine.calls import Call, CallFuture
from rollout_engine.engine.client import ANYWHERE, EngineInfo, Listener, Route
from rollout_engine.engine.driver import EngineDriver
from rollout_engine.engine.engine_lock import EngineLock
from rollout_engine.engine.interrupts import held
from rollout_engine.engine.start_up import engine_info, make_core
from rollout_engine.engine.step_watchdog import StepWatchdog
from rollout_engine.engine.update_steps import UpdateSteps
from rollout_engine.engine.verbs import VERBS
from rollout_engine.execution.executor import InlineExecutor
from rollout_engine.execution.process_executor import make_executor
from rollout_engine.weights.update import update_from_source
from sync.base import WeightSource

logger = logging.getLogger("rollout_engine")

_LOOK_SECONDS = 0.05
"""How often a turn checks for news while paused, which a change ends at once, or while other threads compute."""
_OWN_THREAD_SECONDS = 0.005
"""How often an update checks whether requests have finished that the client's own thread computes."""


class LocalClient:
    """An `EngineClient` over a core and an executor of this process.

    `own_thread=True` computes steps on a thread of the client's; otherwise the threads that wait for results do.
    """

    index = 0

    def __init__(
        self, core: EngineCore, executor: InlineExecutor, info: EngineInfo, *, own_thread: bool = False
    ) -> None:
        self.info = info
        self.dead_error: EngineDeadError | None = None
        """Why nothing can be computed any more; None while it can."""
        self.driver = EngineDriver(core, executor, self._deliver, lock=EngineLock(self._tear))
        self._is_torn = self._is_closed = False
        self._listener: Listener | None = None
        self._watchdog: StepWatchdog | None = None
        self._thread: threading.Thread | None = None
        if own_thread:
            self.begin_thread()

    @classmethod
    def start(
        cls, config: EngineConfig, meanwhile: Callable[[], object] = lambda: None, *, own_thread: bool = False
    ) -> "LocalClient":
        """Load the model that `config` names; `meanwhile` is called as well. Raises `ConfigError`."""
        executor = make_executor(config)
        try:
            meanwhile()
        except BaseException:
            executor.shutdown()
            raise
        core = make_core(config, executor)
        try:
            client = cls(core, executor, engine_info(config, executor.info), own_thread=own_thread)
        except RetryableError:
            executor.shutdown()
            raise
        if config.step_deadline is not None:
            try:
                client._watchdog = StepWatchdog(client.driver, config.step_deadline, client._give_up_own_thread)
            except RetryableError:
                client.shutdown()
                raise
        executor.watch(client._die)
        gc.collect()
        gc.freeze()  # objects made at start-up stay; the collector need not walk them between steps
        logger.info("%s", client.info.choices)
        return client

    def begin_thread(self) -> None:
        """From now on compute steps on a thread of the client's own, if none does yet."""
        with self.driver.lock:
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name="engine", daemon=True)
                self._thread = threads.start(thread)

    @property
    def needs_turns(self) -> bool:
        """Whether steps are computed only by the threads that call `turn`."""
        return self._thread is None

    @property
    def policy_version(self) -> int:
        """Version of the live weights."""
        return self.driver.core.policy_version

    def listen(self, listener: Listener) -> None:
        """Set the listener for outputs. Call it before the first request is added."""
        self._listener = listener

    def add_request(self, request: EngineCoreRequest, route: Route = ANYWHERE) -> None:
        """Queue a request. Raises `RequestError`, nothing queued."""
        self.require_usable()
        self.driver.add_request(request)

    def abort(self, sequence_ids: list[int]) -> None:
        """End sequences; without a core there is nothing to end."""
        if sequence_ids and not self._is_closed:
            self.driver.abort(sequence_ids)

    def call(self, name: str, arguments: Mapping[str, Any]) -> CallFuture:
        """Call a verb, on this thread, or on another one if the caller must be able to leave before it is complete."""
        self.driver.lock.require_usable()
        verb = VERBS[name]
        seconds = verb.seconds(arguments)
        deadline = None if seconds is None else time.monotonic() + seconds
        turned = verb.takes_steps and self._thread is None
        call = Call(verb, arguments, _TurnedFuture(self.turn) if turned else None, deadline=deadline)
        if seconds is None or turned or verb.when != "between steps":  # the last waits for no other thread
            try:
                with held():  # no interrupt arrives between a verb and its result
                    self.driver.run(call)
            except BaseException:  # an interrupt: no caller gets the future
                call.future.cancel()
                raise
        else:
            threads.start_thread(self.driver.run, call, name=name)
        return call.future

    def update_weights(self, source: WeightSource, version: int | None, options: UpdateOptions) -> UpdateReport:
        """Run one whole weight update, on this thread."""
        self.require_usable()
        if options.transport not in (None, "inproc"):
            what = f"transport='{options.transport}' leads to another process"
            raise WeightUpdateError(f"update_weights: {what}; an engine in this one takes weights by 'inproc'.")
        check, updater = threads.raise_if_cancelled, self.driver.executor.updater_for(draft=options.draft)
        steps = UpdateSteps(self.driver, options, self._turn, check)
        deadline = time.monotonic() + options.timeout
        return steps.carry_out(lambda: update_from_source(updater, source, steps, options, version, check), deadline)

    def turn(self, has_news: Callable[[], bool]) -> bool:
        """Compute a step on this thread, unless `has_news()` before it is this thread's turn.

        While paused or asleep, or if all requests wait for a policy version, it computes nothing and waits a moment.
        False: the client's own thread computes. Raises `DirtyWeightsError` for requests that cannot continue before a
        complete weight update.
        """
        driver, core = self.driver, self.driver.core
        driver.lock.require_usable()
        if self._thread is not None:
            return False

        def is_over() -> bool:
            is_idle = core.lifecycle.can_step and not core.num_unfinished_requests
            return is_idle or driver.can_progress() or has_news()

        driver.wait_for_change(is_over, _LOOK_SECONDS)
        driver.give_way()
        while not driver.lock.acquire(_LOOK_SECONDS):
            if has_news():
                return True
        try:
            if not has_news():
                self.require_usable()
                driver.require_step()
                driver.step()
        finally:
            driver.lock.release()
        return True

    def require_usable(self) -> None:
        """Raise `LifecycleError` if nothing can be computed any more."""
        self.driver.lock.require_usable()
        if self._is_torn:
            what = "The engine was interrupted twice in the middle of a step, which may be half done"
            raise LifecycleError(f"{what}: shut it down and make a new one.")
        if self._is_closed:
            raise LifecycleError("The engine is shut down; make a new one.")
        if self.dead_error is not None:
            raise EngineDeadError(*self.dead_error.args)

    def shutdown(self) -> None:
        """Free model and KV pool; open requests are dropped. Calling it again is a no-op."""
        if not self.driver.lock.is_usable or self._is_closed:  # a forked child has nothing to free
            return
        with self.driver.lock:
            self._is_closed = True
            self.dead_error = EngineDeadError("The engine is shut down; make a new one.")
            self.driver.shutdown()
        if self._watchdog is not None:
            self._watchdog.end()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()
            self._fail_all(self.dead_error)
        with self.driver.lock:
            self.driver.executor.shutdown()
        gc.unfreeze()  # so that objects made at start-up can be collected

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        if self._listener is not None:
            self._listener.deliver(outputs)

    def _turn(self) -> None:
        """Compute a step, or wait a moment for the client's own thread to compute one."""
        if not self.turn(lambda: False):
            time.sleep(_OWN_THREAD_SECONDS)

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                self.driver.wait_for_change(lambda: self._is_closed or self.driver.can_progress())
                self.driver.give_way()
                with self.driver.lock:
                    if not self._is_closed:
                        self.driver.step()
        except Exception as problem:
            logger.critical("the engine's thread failed", exc_info=problem)
            self._give_up(f"failed: {error_text(problem)}")

    def _give_up(self, reason: str) -> None:
        """Fail every request: the client's own thread computes no more."""
        self._die(f"The engine's thread {reason}")

    def _die(self, reason: str) -> None:
        """Fail every request: nothing can be computed any more."""
        self.dead_error = EngineDeadError(reason)
        self._fail_all(self.dead_error)

    def _give_up_own_thread(self, reason: str) -> None:
        """Give up if the client's own thread is stuck. The log and `check_health` report a stuck thread of a caller."""
        if self._thread is not None:
            self._give_up(reason)

    def _fail_all(self, error: EngineDeadError) -> None:
        if self._listener is not None:
            self._listener.fail_all(error)

    def _tear(self) -> None:
        self._is_torn = True
        self.driver.core.shutdown()


class _TurnedFuture(CallFuture):
    """A future that later steps set, which the thread that waits for it computes."""

    def __init__(self, turn: Callable[[Callable[[], bool]], object]) -> None:
        super().__init__()
        self._turn = turn

    def result(self, timeout: float | None = None) -> Any:
        """Compute steps until the result is there.

        Raises `TimeoutError` if it is not after `timeout` seconds, unless this thread computes a step by then.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._is_over(deadline):
            self._turn(lambda: self._is_over(deadline))
        return super().result(0)

    def _is_over(self, deadline: float) -> bool:
        return self.done() or time.monotonic() >= deadline
