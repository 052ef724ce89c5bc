"""Steps on a thread of their own, one after the other, so that their submitter can prepare the next meanwhile."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from rollout_engine.messages import ModelRunnerOutput


class StepThread:
    """One thread. It lives until `close`, or until nobody knows this any more."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="steps")
        self._last: Future[ModelRunnerOutput] | None = None

    def submit(self, step: Callable[[], ModelRunnerOutput]) -> Callable[[], ModelRunnerOutput]:
        """Run `step` behind those before it; returns what waits for its result. When that raises, nothing runs."""
        self._last = future = self._pool.submit(step)
        return partial(self._result, future)

    def rest(self) -> None:
        """Wait until nothing runs, whether or not its result was asked for."""
        if self._last is not None:
            wait([self._last])
            self._last = None

    def close(self) -> None:
        """Wait, and end the thread."""
        self._pool.shutdown()

    def _result(self, future: Future[ModelRunnerOutput]) -> ModelRunnerOutput:
        try:
            return future.result()
        except BaseException:  # its own, or an interrupt of the wait
            self.rest()
            raise
