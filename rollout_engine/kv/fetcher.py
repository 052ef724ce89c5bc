"""Blocks that a thread brings near before they are loaded: read, verified, and kept until then.

    begin(keys) -> wait      the thread reads the blocks in order
    take(key)                a block that was read; it is near no more

Blocks that no caller takes leave when others need their room, or after a minute at the next fetch.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rollout_engine.base.threads import start_thread
from rollout_engine.kv.connector import Wait

STEP_NS = 1000
"""Each block of a fetch counts as used this much before the last one, so that the end of a chain leaves first."""
_KEPT_SECONDS = 60.0
_CLOSE_SECONDS = 10.0


class _Near(NamedTuple):
    data: memoryview
    since: float


class _Job(NamedTuple):
    keys: Sequence[bytes]
    is_done: threading.Event


class Fetcher:
    """The blocks that are near, and the thread that reads them. Any thread may call it."""

    def __init__(self, read: Callable[[bytes, int], memoryview | None], max_bytes: int) -> None:
        """`read(key, used_ns)` reads a block, used at that time, and never raises; `max_bytes` bounds the blocks near.

        Raises `RetryableError` if no thread can be started.
        """
        self._read, self._max_bytes = read, max_bytes
        self._near: OrderedDict[bytes, _Near] = OrderedDict()
        self._num_bytes = 0
        self._num_forgotten = 0
        """Times that blocks were forgotten: one that was being read meanwhile is not kept."""
        self.seconds = 0.0
        """Time of the thread in fetches."""
        self._jobs: deque[_Job] = deque()
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = start_thread(self._run, name="kv-fetcher")

    def begin(self, keys: Sequence[bytes]) -> Wait:
        """Begin to read blocks, those that are near excepted."""
        job = _Job(keys, threading.Event())
        with self._changed:
            if self._is_closed:
                job.is_done.set()
            else:
                self._jobs.append(job)
                self._changed.notify()
        return job.is_done.wait

    def has(self, key: bytes) -> bool:
        """Whether a block is near."""
        return key in self._near

    def take(self, key: bytes) -> memoryview | None:
        """A block that is near; from now on it is not."""
        if key not in self._near:
            return None
        with self._changed:
            near = self._near.pop(key, None)
            if near is None:
                return None
            self._num_bytes -= len(near.data)
            return near.data

    def forget(self, keys: Iterable[bytes] | None = None) -> None:
        """Drop blocks that are near, or all; those that are being read are not kept."""
        with self._changed:
            self._num_forgotten += 1
            for key in list(self._near) if keys is None else keys:
                self._drop(key)

    def close(self) -> bool:
        """End the thread and all waits; False if it has not ended within ten seconds."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_SECONDS)
        for job in self._jobs:
            job.is_done.set()
        self.forget()
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if self._is_closed:
                    return
                job = self._jobs[0]
            began = time.perf_counter()
            try:
                self._fetch(job.keys)
            finally:
                self.seconds += time.perf_counter() - began
                with self._changed:
                    self._jobs.popleft()
                job.is_done.set()

    def _fetch(self, keys: Sequence[bytes]) -> None:
        """Read blocks until those of this fetch alone would not fit."""
        left, began_ns = self._max_bytes, time.time_ns()
        for place, key in enumerate(keys):
            num_forgotten = self._num_forgotten
            if self._is_closed or key in self._near:
                continue
            data = self._read(key, began_ns - place * STEP_NS)
            if data is None:
                continue
            left -= len(data)
            if left < 0:
                return
            self._keep(key, data, num_forgotten)

    def _keep(self, key: bytes, data: memoryview, num_forgotten: int) -> None:
        now = time.monotonic()
        with self._changed:
            if self._num_forgotten != num_forgotten or self._is_closed:
                return
            self._drop(key)
            while self._near:
                oldest = next(iter(self._near))
                has_room = self._num_bytes + len(data) <= self._max_bytes
                if has_room and now - self._near[oldest].since < _KEPT_SECONDS:
                    break
                self._drop(oldest)
            self._near[key] = _Near(data, now)
            self._num_bytes += len(data)

    def _drop(self, key: bytes) -> None:
        near = self._near.pop(key, None)
        if near is not None:
            self._num_bytes -= len(near.data)
