"""Shows the metrics of an engine to its stat loggers, from a thread of its own."""

import threading
import time
from collections.abc import Callable, Sequence
from copy import deepcopy

from rollout_engine.errors import EngineDeadError
from rollout_engine.metrics import EngineMetrics, StatLogger
from rollout_engine.telemetry.logger_thread import LoggerThread
from rollout_engine.telemetry.stat_loggers import is_stock
from rollout_engine.threads import start

_POLL_SECONDS = 0.5
"""Most seconds until the end of the work is noticed."""


class StatThread:
    """Logs at an interval while there is work, and when the work is done.

    Loggers of users have a `LoggerThread` each, so that none delays another.
    """

    def __init__(
        self,
        loggers: Sequence[StatLogger],
        read: Callable[[], EngineMetrics],
        has_work: Callable[[], bool],
        interval: float,
    ) -> None:
        self._stock = [each for each in loggers if is_stock(each)]
        self._threads = [LoggerThread(each, read) for each in loggers if not is_stock(each)]
        self._read, self._has_work, self._interval = read, has_work, interval
        self._lock, self._wake, self._stop = threading.Lock(), threading.Event(), threading.Event()
        self._working = False
        self._since: float | None = None
        """When the work began or was last logged; None while idle."""
        self._thread = threading.Thread(target=self._run, name="stat-loggers", daemon=True)
        for each in self._stock:
            each.attach(read)
        if loggers:
            start(self._thread)

    def begin(self) -> None:
        """Note that there is work."""
        if not self._working:
            self._working = True
            self._wake.set()

    def write(self) -> None:
        """Log now; returns when every logger that does not hang has been called. Raises `EngineDeadError`."""
        with self._lock:
            self._write()
        for thread in self._threads:
            thread.flush()

    def close(self) -> None:
        """Close every logger, after a last call where there was work. Calling it again is a no-op."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        for thread in self._threads:
            thread.close()
        for stock in self._stock:
            stock.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._wake.wait()
                self._wake.clear()
                if self._working:
                    self._log_work()
        except EngineDeadError:
            pass  # readers get this error; a log has nothing to add

    def _log_work(self) -> None:
        """Log until the work is done, or this is closed."""
        with self._lock:
            self._since = time.monotonic()
        while self._working:
            is_stopped = self._stop.wait(min(self._interval, _POLL_SECONDS))
            self._working = False  # before the check: work that begins after it must wake this thread
            if self._has_work() and not is_stopped:
                self._working = True
            with self._lock:
                if not self._working or time.monotonic() - self._since >= self._interval:
                    self._write()
        with self._lock:
            self._since = None

    def _write(self) -> None:
        now = time.monotonic()
        seconds = 0.0 if self._since is None else now - self._since
        metrics = self._read()
        for stock in self._stock:
            stock.log(metrics, seconds)
        for thread in self._threads:
            thread.log(deepcopy(metrics), seconds)
        self._since = None if self._since is None else now
