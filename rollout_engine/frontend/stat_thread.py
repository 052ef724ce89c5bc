"""Shows the metrics of an engine in another process to its stat loggers, from a thread of its own."""

import threading
from collections.abc import Callable, Sequence

from rollout_engine.errors import EngineDeadError
from rollout_engine.frontend.stat_loggers import StatLog
from rollout_engine.metrics import EngineMetrics, StatLogger

_LOOK_SECONDS = 0.5
"""How soon a falling idle is noticed."""


class StatThread:
    """Logs at an interval while there is work and when it is done, as an engine in process does between steps."""

    def __init__(
        self,
        loggers: Sequence[StatLogger],
        read: Callable[[], EngineMetrics],
        has_work: Callable[[], bool],
        interval: float,
    ) -> None:
        self._log = StatLog(loggers, read, interval)
        self._has_work, self._seconds = has_work, min(interval, _LOOK_SECONDS)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="stat-loggers", daemon=True)
        if loggers:
            self._thread.start()

    def write(self) -> None:
        """Show the metrics now. Raises `EngineDeadError`."""
        with self._lock:
            self._log.write()

    def close(self) -> None:
        """Let every logger go."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        self._log.close()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._seconds):
                with self._lock:
                    if self._has_work():
                        self._log.begin()
                    self._log.tick(idle=not self._has_work())
        except EngineDeadError:
            pass  # open requests are told; a log has nothing to add
