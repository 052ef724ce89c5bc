"""Writes and removals of a store, carried out in order by one thread; bounded in bytes.

save(key, data)   a copy waits, and is found by its key until it is stored        full: it is dropped
drop(keys)        hidden from now on, removed later
clear()           all that is stored is hidden from now on, and removed later
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from rollout_engine.base.threads import start_thread

_CLOSE_SECONDS = 10.0


class Store(Protocol):
    """The calls that the thread makes, one at a time."""

    def write(self, key: bytes, data: bytes) -> bool:
        """Store a block; False if it is stored already."""
        ...

    def remove(self, key: bytes) -> None:
        """Remove a block, if it is stored."""
        ...

    def clear(self) -> None:
        """Remove all blocks."""
        ...


class _Write(NamedTuple):
    key: bytes
    data: bytes


class _Removal(NamedTuple):
    key: bytes


class _Clearing(NamedTuple):
    pass


class WriteQueue:
    """The queue and its thread. Any thread may call it."""

    def __init__(
        self,
        store: Store,
        max_bytes: int,
        on_stored: Callable[[int], None],
        on_fault: Callable[[BaseException, bool], None],
    ) -> None:
        """`on_stored(num_bytes)`; `on_fault(problem, is_write)`. Raises `RetryableError` if no thread starts."""
        self._store, self._max_bytes, self._on_stored, self._on_fault = store, max_bytes, on_stored, on_fault
        self._jobs: deque[_Write | _Removal | _Clearing] = deque()
        self._writes: dict[bytes, _Write] = {}
        """Newest write of each key that waits or is carried out."""
        self._removals = Counter[bytes]()
        self._num_clearings = self._num_bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = start_thread(self._run, name="kv-writer")

    def save(self, key: bytes, data: memoryview) -> bool:
        """Copy `data` and have it stored; False if there is no room for it in the queue, or no memory."""
        with self._changed:
            if key in self._writes:
                return True
            if self._is_closed or (self._writes and self._num_bytes + len(data) > self._max_bytes):
                return False
            self._num_bytes += len(data)
        try:
            write = _Write(key, bytes(data))
        except MemoryError:
            with self._changed:
                self._num_bytes -= len(data)
            return False
        with self._changed:
            self._writes[key] = write
            self._add(write)
        return True

    def find(self, key: bytes) -> bytes | None:
        """The bytes of a block that is not stored yet."""
        write = self._writes.get(key)
        return None if write is None else write.data

    def hides(self, key: bytes) -> bool:
        """Whether the block's removal waits: it counts as not stored."""
        return self._num_clearings > 0 or key in self._removals

    def drop(self, keys: Iterable[bytes]) -> None:
        """Have blocks removed."""
        with self._changed:
            for key in keys:
                self._writes.pop(key, None)
                self._removals[key] += 1
                self._add(_Removal(key))

    def clear(self) -> None:
        """Have all blocks removed."""
        with self._changed:
            self._writes.clear()
            self._num_clearings += 1
            self._add(_Clearing())

    def wait_until_empty(self, seconds: float) -> bool:
        """Wait until all is carried out; False if it is not within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, seconds)

    def close(self) -> bool:
        """Take nothing more, carry out all that waits, and end the thread; False if it lives on after ten seconds."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_SECONDS)
        return not self._thread.is_alive()

    def _add(self, job: _Write | _Removal | _Clearing) -> None:
        self._jobs.append(job)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                job = self._jobs[0]
                is_wanted = not isinstance(job, _Write) or self._writes.get(job.key) is job
            if is_wanted:
                self._carry_out(job)
            with self._changed:
                self._jobs.popleft()
                self._end(job)
                self._changed.notify_all()

    def _carry_out(self, job: _Write | _Removal | _Clearing) -> None:
        try:
            match job:
                case _Write(key, data):
                    if self._store.write(key, data):
                        self._on_stored(len(data))
                case _Removal(key):
                    self._store.remove(key)
                case _Clearing():
                    self._store.clear()
        except Exception as problem:
            self._on_fault(problem, isinstance(job, _Write))

    def _end(self, job: _Write | _Removal | _Clearing) -> None:
        match job:
            case _Write(key, data):
                self._num_bytes -= len(data)
                if self._writes.get(key) is job:
                    del self._writes[key]
            case _Removal(key):
                self._removals[key] -= 1
                if not self._removals[key]:
                    del self._removals[key]
            case _Clearing():
                self._num_clearings -= 1
