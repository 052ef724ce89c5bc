"""Steps that were submitted and are computed when their results are asked for, or when the executor has to be idle."""

from collections import deque
from collections.abc import Callable

from rollout_engine.base.messages import ModelRunnerOutput


class _Step:
    """One submitted step, computed once."""

    def __init__(self, run: Callable[[], ModelRunnerOutput]) -> None:
        self._run: Callable[[], ModelRunnerOutput] | None = run
        self._result: ModelRunnerOutput | None = None
        self.error: BaseException | None = None

    def compute(self) -> None:
        """Compute it, unless that was done; keep its result or its error."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            self._result = run()
        except BaseException as error:
            self.error = error
            if not isinstance(error, Exception):  # an interrupt is the caller's
                raise

    def result(self) -> ModelRunnerOutput:
        """Its result. Raises its error."""
        self.compute()
        if self.error is not None:
            raise self.error
        assert self._result is not None, "it was computed"
        return self._result


class StepsAhead:
    """Computes steps in the order in which they were submitted, on the thread that waits for them."""

    def __init__(self) -> None:
        self._waiting: deque[_Step] = deque()

    def submit(self, run: Callable[[], ModelRunnerOutput]) -> Callable[[], ModelRunnerOutput]:
        """Queue a step; returns a function that waits for its result."""
        step = _Step(run)
        self._waiting.append(step)

        def wait() -> ModelRunnerOutput:
            while self._waiting and step in self._waiting:
                each = self._waiting.popleft()  # those before it are not asked for: they are behind one that failed
                if each is step:
                    break
            try:
                return step.result()
            except BaseException:
                self._waiting.clear()  # no caller asks for those behind it
                raise

        return wait

    def finish(self) -> None:
        """Compute all that were submitted, up to the first that fails; those behind it are not asked for."""
        for step in list(self._waiting):
            step.compute()
            if step.error is not None:
                break
