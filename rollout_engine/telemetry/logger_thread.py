"""Runs one stat logger of a user on a thread of its own, so that its errors and waits never reach a step."""

import logging
import threading
from collections import deque
from collections.abc import Callable

from rollout_engine.base.errors import text_of
from rollout_engine.base.metrics import EngineMetrics, StatLogger
from rollout_engine.base.threads import start_thread

MAX_WAITING = 8
"""Most calls queued for a slow logger; the next one replaces the last of them, and their seconds add up."""
PATIENCE_SECONDS = 5.0
"""How long `flush` and `close` wait for a logger."""
logger = logging.getLogger("rollout_engine")


class LoggerThread:
    """Calls one `StatLogger` in order. Its first error is logged with its name, and later calls are still made.

    A logger whose `attach` raises is not called again.
    """

    def __init__(self, stat_logger: StatLogger, read: Callable[[], EngineMetrics]) -> None:
        kind = type(stat_logger)
        self._name = f"stat logger {kind.__module__}.{kind.__qualname__}"
        self._logger = stat_logger
        self._waiting: deque[tuple[EngineMetrics, float]] = deque()
        self._changed = threading.Condition()
        self._busy = self._closing = self._has_failed = False
        self._thread: threading.Thread | None = None
        self._is_attached = self._guard_call(stat_logger.attach, read)

    def log(self, metrics: EngineMetrics, seconds: float) -> None:
        """Queue a call of the logger. Never waits."""
        if not self._is_attached:
            return
        with self._changed:
            if len(self._waiting) == MAX_WAITING:
                seconds += self._waiting.pop()[1]
            self._waiting.append((metrics, seconds))
            self._wake()

    def flush(self) -> None:
        """Wait until the logger has been called with everything so far, `PATIENCE_SECONDS` at most."""
        with self._changed:
            if self._thread is None:
                return
            done = self._changed.wait_for(lambda: not (self._waiting or self._busy), PATIENCE_SECONDS)
        if not done:
            logger.warning("%s has not returned for %g s: nobody waits for it", self._name, PATIENCE_SECONDS)

    def close(self) -> None:
        """Call the logger's `close` after all queued calls, and wait for it `PATIENCE_SECONDS` at most."""
        if not self._is_attached or self._closing:
            return
        with self._changed:
            self._closing = True
            thread = self._wake()
        if thread is None:
            return
        thread.join(PATIENCE_SECONDS)
        if thread.is_alive():
            logger.warning("%s has not ended within %g s: it is left behind", self._name, PATIENCE_SECONDS)

    def _wake(self) -> threading.Thread | None:
        self._changed.notify_all()
        if self._thread is None:
            self._guard_call(self._start)
        return self._thread

    def _start(self) -> None:
        self._thread = start_thread(self._run, name="stat-logger")

    def _run(self) -> None:
        while (call := self._next()) is not None:
            self._guard_call(self._logger.log, *call)
        self._guard_call(self._logger.close)

    def _next(self) -> tuple[EngineMetrics, float] | None:
        """Wait for the arguments of the logger's next call; None: close it."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._closing)
            self._busy = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None

    def _guard_call(self, call: Callable[..., object], *arguments: object) -> bool:
        """Make a call and log its first error. Returns whether it raised none."""
        try:
            call(*arguments)
        except (Exception, SystemExit) as problem:
            if not self._has_failed:
                self._has_failed = True
                logger.warning(
                    "%s raised %s: %s", self._name, type(problem).__name__, text_of(problem), exc_info=problem
                )
            return False
        return True
