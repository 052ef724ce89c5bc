"""A watchdog of progress: it names the step, verb or commit of weights that does not end, and the user's code in it.

`EngineConfig.step_deadline` is how long one may take; a commit, which is not the user's code, may in addition take as
long as a slow copy of its bytes (`Work.allowance`). Then the user's code is interrupted: a logits processor fails its
own request, a method of a worker extension its call. Code that cannot be interrupted is given up: a core in its own
process ends, and reports why; in process nothing can end it, and the log and `check_health` report its position.
"""

import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable

from rollout_engine.base.threads import start_thread
from rollout_engine.base.user_code import UserCode, running_on
from rollout_engine.engine.driver import EngineDriver, Work

logger = logging.getLogger("rollout_engine")

_LOOK_SECONDS = 0.2
"""Between two looks at work that is about to be late."""
_RARE_SECONDS = 2.0
_GRACE_SECONDS = 0.7
"""How long code that was interrupted may take to end."""
_BRIEF_SECONDS = 0.5
"""How long code may run that is not to blame for a step that is late."""
_NUM_FRAMES = 12


class StepWatchdog:
    """A thread that checks that steps and verbs of a driver end. It ends with the driver.

    Args:
        driver: the driver to watch.
        seconds: how long one step or verb may take.
        give_up: called with the reason if work does not end and cannot be interrupted.
    """

    def __init__(self, driver: EngineDriver, seconds: float, give_up: Callable[[str], object]) -> None:
        self.seconds = seconds
        self._driver, self._give_up = weakref.ref(driver), give_up
        self._work: Work | None = None
        self._code: UserCode | None = None
        self._since = self._code_since = 0.0
        """When the work began, or continued after an interrupt; when its code was first seen."""
        self._interrupted_at: float | None = None
        self._has_interrupted = self._has_given_up = False
        self._over = threading.Event()
        self._thread = start_thread(self._run, name="step-watchdog")

    def end(self) -> None:
        """End the thread."""
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        looked, computed = time.monotonic(), time.process_time()
        interval = min(_LOOK_SECONDS, self.seconds / 4)
        while not self._over.wait(interval):
            now, cpu = time.monotonic(), time.process_time()
            pause = now - looked - interval
            if pause > 4 * _LOOK_SECONDS and cpu - computed < pause / 2:  # this process stood still, and the work in it
                self._since, self._code_since = self._since + pause, self._code_since + pause
            looked, computed = now, cpu
            driver = self._driver()
            if driver is None:
                return
            self._look(driver, now)
            del driver
            interval = self._interval(now)

    def _interval(self, now: float) -> float:
        """Seconds until the next look: each takes a processor from the threads of a step, so most are far apart."""
        left = self.seconds if self._work is None else self._limit(self._work) - (now - self._since)
        return max(min(_LOOK_SECONDS, self.seconds / 4), min(_RARE_SECONDS, self.seconds / 4, left / 2))

    def _limit(self, work: Work) -> float:
        return self.seconds + work.allowance

    def _look(self, driver: EngineDriver, now: float) -> None:
        work = driver.work
        threads = () if work is None else (work.thread, *driver.executor.threads)
        code = running_on(threads)
        if work is not self._work:
            self._work, self._since = work, now if work is None else work.start
            self._has_interrupted = self._has_given_up = False
            self._interrupted_at, driver.stuck = None, ""
        if code is not self._code:
            self._code, self._code_since = code, now
            if self._interrupted_at is not None:  # it has ended, and the work continues
                self._interrupted_at, self._since = None, now
        if work is None or self._has_given_up:
            return
        if self._interrupted_at is not None:
            if now - self._interrupted_at > _GRACE_SECONDS:
                self._give_up_on(driver, work, threads)
        elif code is not None:
            is_late = self._has_interrupted or now - self._since > self._limit(work)
            if is_late and now - self._code_since > min(_BRIEF_SECONDS, self.seconds / 4):
                self._interrupt(code, work)
                self._interrupted_at, self._has_interrupted = now, True
        elif now - self._since > self._limit(work):
            self._give_up_on(driver, work, threads)

    def _interrupt(self, code: UserCode, work: Work) -> None:
        what = code.describe()
        logger.error("%s does not return, in %s: it is interrupted", what, work.what)
        code.interrupt(f"{what} did not return within {self._described_limit(work)} and was interrupted")

    def _described_limit(self, work: Work) -> str:
        more = f" and {work.allowance:.3g} s for its size" if work.allowance else ""
        return f"step_deadline={self.seconds:g} s{more}"

    def _give_up_on(self, driver: EngineDriver, work: Work, threads: tuple[int, ...]) -> None:
        self._has_given_up = True
        code, frames = running_on(threads), sys._current_frames()
        busy = threads if code is None else (code.thread,)
        stacks = [traceback.extract_stack(frames[thread])[-_NUM_FRAMES:] for thread in busy if thread in frames]
        what = f"{work.what} has" if code is None else f"{code.describe()}, in {work.what}, has"
        where = "".join(f"; it is at {stack[-1].filename}:{stack[-1].lineno}" for stack in stacks[-1:])
        driver.stuck = f"{what} not ended within {self._described_limit(work)}{where}"
        text = "\n".join("".join(traceback.format_list(stack)) for stack in stacks)
        logger.critical("%s\n%s", driver.stuck, text)
        self._give_up(driver.stuck)
