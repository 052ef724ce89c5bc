"""A thread that runs steps one after the other, while the caller prepares the next one."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from rollout_engine.base.messages import ModelRunnerOutput
from rollout_engine.base.threads import no_thread


class StepThread:
    """Runs steps in order on one thread, which ends with `close` or when this object is garbage-collected.

    Raises `RetryableError` if the system starts no more threads.
    """

    def __init__(self) -> None:
        self.ids: tuple[int, ...] = ()
        """Its thread's id, once there is one."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="steps", initializer=self._begin)
        try:
            self._pool.submit(int)  # its thread begins now: a step that finds none would be run in the place of another
        except RuntimeError as problem:
            raise no_thread("steps", problem) from problem
        self._last: Future[ModelRunnerOutput] | None = None

    def submit(self, step: Callable[[], ModelRunnerOutput]) -> Callable[[], ModelRunnerOutput]:
        """Queue `step`; returns a function that waits for its result. When that raises, no step is running."""
        self._last = future = self._pool.submit(step)
        return partial(self._result, future)

    def wait_until_idle(self) -> None:
        """Wait until no step is running, whether or not its result was asked for."""
        if self._last is not None:
            wait([self._last])
            self._last = None

    def close(self) -> None:
        """Wait for the steps that were submitted, and end the thread."""
        self._pool.shutdown()

    def _begin(self) -> None:
        self.ids = (threading.get_ident(),)

    def _result(self, future: Future[ModelRunnerOutput]) -> ModelRunnerOutput:
        try:
            return future.result()
        except BaseException:  # its own, or an interrupt of the wait
            self.wait_until_idle()
            raise
