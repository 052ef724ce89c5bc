"""Shows the metrics of an engine to its stat loggers, from a thread of its own."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Protocol

from rollout_engine.base.errors import CallTimeoutError, EngineDeadError
from rollout_engine.base.metrics import EngineMetrics, StatLogger
from rollout_engine.base.threads import start
from rollout_engine.telemetry.logger_thread import LoggerThread
from rollout_engine.telemetry.stat_loggers import is_stock

logger = logging.getLogger("rollout_engine")

_POLL_SECONDS = 0.5
"""Most seconds until the end of the work is noticed."""
_READ_SECONDS = 2.0
"""Most seconds until `close` is noticed while the engine does not report."""


class MetricsReader(Protocol):
    """Reads the metrics of an engine."""

    def __call__(self, timeout: float | None = None) -> EngineMetrics:
        """Raises `CallTimeoutError` if the engine does not answer within `timeout` seconds."""
        ...


class StatThread:
    """Logs at an interval while there is work, and when the work is done.

    Loggers of users have a `LoggerThread` each, so that none delays another.
    """

    def __init__(
        self,
        loggers: Sequence[StatLogger],
        read: MetricsReader,
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

    def write(self, timeout: float | None = None) -> None:
        """Log now; returns when every logger that does not hang has been called.

        Raises `EngineDeadError`, and `CallTimeoutError` if the engine does not answer within `timeout` seconds.
        """
        self._write(self._read(timeout))
        for thread in self._threads:
            thread.flush()

    def close(self) -> None:
        """Close every logger, after a last call if there was work. Calling it again is a no-op."""
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
            if not self._working or time.monotonic() - self._since >= self._interval:
                metrics = self._read_until_closed()
                if metrics is not None:
                    self._write(metrics)
        with self._lock:
            self._since = None

    def _read_until_closed(self) -> EngineMetrics | None:
        """The metrics; None if this is closed while the engine does not answer."""
        while True:
            try:
                return self._read(_READ_SECONDS)
            except CallTimeoutError:
                if self._stop.is_set():
                    logger.warning("the engine is busy and was not asked for its last statistics")
                    return None

    def _write(self, metrics: EngineMetrics) -> None:
        with self._lock:
            now = time.monotonic()
            seconds = 0.0 if self._since is None else now - self._since
            for stock in self._stock:
                stock.log(metrics, seconds)
            for thread in self._threads:
                thread.log(deepcopy(metrics), seconds)
            self._since = None if self._since is None else now
