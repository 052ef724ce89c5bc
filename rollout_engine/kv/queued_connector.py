"""The base of connectors whose stores are slow: they are written and read by threads.

    save ──> WriteQueue ──> store                             one copy on the caller's thread
    fetch ──> Fetcher ──> _read_ahead                         on a thread
    load <── WriteQueue | Fetcher | _read_now

A block that waits to be written is found; one that waits to be removed is not.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from rollout_engine.kv.connector import Wait
from rollout_engine.kv.counters import Counters
from rollout_engine.kv.fetcher import Fetcher
from rollout_engine.kv.notices import Notices
from rollout_engine.kv.write_queue import Store, WriteQueue

_QUEUE_BYTES = 256 << 20
"""Most bytes that wait to be written."""


class QueuedConnector(ABC):
    """A subclass opens its store and calls `_start`; until then, and after `_end`, nothing is found or taken."""

    def __init__(self, name: str) -> None:
        """`name`: for log lines."""
        self._notices = Notices(name)
        self._counters = Counters()
        self._is_open = False

    def fetch(self, keys: Sequence[bytes]) -> Wait | None:
        """Begin to bring blocks near, on a thread."""
        wanted = self._choose_far(keys) if self._is_usable() else []
        return self._fetcher.begin(wanted) if wanted else None

    def load(self, key: bytes) -> memoryview | None:
        """Bytes of a block: those that wait to be written, that were fetched, or that are read now."""
        began = time.perf_counter()
        data = self._find(key) if self._is_usable() else None
        self._counters.count_load(data, began)
        return data

    def save(self, key: bytes, data: memoryview) -> None:
        """Copy the bytes; a thread stores them. A full queue drops them."""
        began = time.perf_counter()
        is_taken = self._is_usable() and self._queue.save(key, data)
        self._counters.add(num_dropped=not is_taken, save_seconds=time.perf_counter() - began)

    def holds(self, key: bytes) -> bool:
        """Whether the block waits to be written, or is stored as far as this process can see without a wait."""
        if not self._is_open:
            return False
        return self._queue.find(key) is not None or (not self._queue.hides(key) and self._is_stored(key))

    def drop(self, keys: Iterable[bytes]) -> None:
        """Hide blocks now, and have them removed, those of other engines as well."""
        keys = list(keys)
        if self._is_usable():
            self._queue.drop(keys)
            self._fetcher.forget(keys)

    def reset(self) -> None:
        """Hide all blocks of this layout now, and have them removed, also for other engines."""
        if self._is_usable():
            self._queue.clear()
            self._fetcher.forget()

    def wait_until_written(self, seconds: float) -> bool:
        """Wait until all that was saved or dropped is carried out; False if it is not within `seconds`."""
        return not self._is_open or self._queue.wait_until_empty(seconds)

    def _start(self, store: Store, near_bytes: int) -> None:
        """Start the threads. `near_bytes`: bound of the blocks that were fetched and not loaded yet."""
        self._queue = WriteQueue(store, _QUEUE_BYTES, self._counters.count_stored, self._count_fault)
        self._fetcher = Fetcher(self._read_ahead, near_bytes)
        self._is_open = True

    def _end(self) -> bool:
        """Store all blocks that wait, and end the threads; False if one of them lives on, and may use the store."""
        is_written, is_read = self._queue.close(), self._fetcher.close()
        self._is_open = False
        return is_written and is_read

    def _find(self, key: bytes) -> memoryview | None:
        waiting = self._queue.find(key)
        if waiting is not None:
            return memoryview(waiting)
        if self._queue.hides(key):
            return None
        fetched = self._fetcher.take(key)
        return fetched if fetched is not None else self._read_now(key)

    def _refuse(self, kind: str, text: str) -> None:
        """Count a damaged or foreign block; log the first of each kind."""
        self._counters.add(num_refused=1)
        self._notices.warn(kind, text)

    def _count_fault(self, problem: BaseException, is_write: bool) -> None:
        self._counters.add(num_dropped=is_write)
        what = "a block could not be written and is dropped" if is_write else "blocks could not be removed"
        kind, text = self._describe(problem)
        self._notices.warn(f"{what} {kind}", f"{what}: {text}")

    def _is_usable(self) -> bool:
        return self._is_open

    @abstractmethod
    def _choose_far(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the blocks for which a fetch has something to do."""

    @abstractmethod
    def _is_stored(self, key: bytes) -> bool:
        """Whether the store has a block, or it was fetched."""

    @abstractmethod
    def _read_ahead(self, key: bytes, used_ns: int) -> memoryview | None:
        """Read a block on the fetching thread; it counts as used at `used_ns`."""

    @abstractmethod
    def _read_now(self, key: bytes) -> memoryview | None:
        """Read a block on the caller's thread."""

    @abstractmethod
    def _describe(self, problem: BaseException) -> tuple[str, str]:
        """The kind of a fault, of which one is logged, and words for it."""
