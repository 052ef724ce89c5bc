"""The connectors "shm" and "disk:DIRECTORY": blocks as files that engines of one user share.

    save ──> WriteQueue ──> BlockDirectory.write              one copy on the caller's thread
    fetch ──> Fetcher ──> BlockDirectory.read                 read and verified on a thread
    load <── WriteQueue | Fetcher | BlockDirectory.read

Files in memory are mapped. Those on a disk are read: a mapped page whose disk fails would end the process.
"""

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from rollout_engine.base.errors import ConfigError, error_text
from rollout_engine.kv.block_directory import BlockDirectory
from rollout_engine.kv.block_frame import DamagedBlock
from rollout_engine.kv.connector import KVConnectorStats, KVLayout, Wait
from rollout_engine.kv.fetcher import Fetcher
from rollout_engine.kv.notices import Notices
from rollout_engine.kv.write_queue import WriteQueue

SHARED_MEMORY = Path("/dev/shm")
"""File system in memory, in which "shm" makes its directory."""
_PREFIX = "rollout_kv_"
"""Prefix of its name; those of other directories of engines, which are swept, begin otherwise."""
_QUEUE_BYTES = 256 << 20
_NEAR_BYTES = 1 << 30
"""Most bytes that wait to be written, and that were read from a disk and not loaded yet; less for a small store."""
_PROBED_KEYS = 64
"""Blocks that a fetch looks for before it wakes the thread."""


class DirectoryConnector:
    """Blocks in a directory of this user's. See `DiskConnector` and `SharedMemoryConnector`."""

    def __init__(self, name: str, path: Path, max_bytes: int | None, *, is_shared_memory: bool) -> None:
        """`name`: as the user gave it, for errors and log lines."""
        self._name, self._path, self._asked_bytes = name, path, max_bytes
        self._is_shared_memory = is_shared_memory
        self._notices = Notices(name)
        self._stats = KVConnectorStats()
        self._lock = threading.Lock()
        self._is_open = False
        """Other calls than `open` find nothing and do nothing if it is not."""

    def open(self, layout: KVLayout) -> dict[str, str]:
        """Open the directory, made if it is absent. Raises `ConfigError` if it is not this user's alone."""
        try:
            blocks = BlockDirectory(self._path, layout.namespace, self._asked_bytes, is_mapped=self._is_shared_memory)
        except OSError as problem:
            raise ConfigError(
                f"kv_connector={self._name!r}: the directory {self._path} cannot be used: {_words(problem)}. Give a "
                "directory that is this user's alone (mode 0700), or one that is not there yet."
            ) from problem
        near_bytes = blocks.max_bytes // 2 if self._is_shared_memory else min(_NEAR_BYTES, blocks.max_bytes)
        try:
            self._blocks, self._namespace = blocks, layout.namespace
            self._queue = WriteQueue(blocks, _QUEUE_BYTES, self._count_stored, self._count_fault)
            self._fetcher = Fetcher(self._read_ahead, near_bytes)
        except BaseException:
            blocks.close()
            raise
        self._is_open = True
        return {"connector": self._name, "namespace": layout.namespace, "directory": str(self._path)}

    def meet(self, peers: Sequence[Mapping[str, str]]) -> None:
        """Log a warning if an engine of the fleet cannot share blocks with this one."""
        for peer in peers:
            if peer.get("namespace") != self._namespace:
                text = "an engine of the fleet has blocks of another layout, so the two share none"
                self._notices.warn("namespace", text)

    def fetch(self, keys: Sequence[bytes]) -> Wait | None:
        """Begin to read and verify blocks, on a thread."""
        if not self._is_open:
            return None
        wanted = [key for key in keys[:_PROBED_KEYS] if self._is_far(key)]
        wanted += keys[_PROBED_KEYS:]
        return self._fetcher.begin(wanted) if wanted else None

    def load(self, key: bytes) -> memoryview | None:
        """Bytes of a block: those that wait to be written, that were fetched, or that are read now."""
        began = time.perf_counter()
        data = self._find(key)
        with self._lock:
            if data is None:
                self._stats.num_misses += 1
            else:
                self._stats.num_loaded += 1
                self._stats.num_loaded_bytes += len(data)
            self._stats.load_seconds += time.perf_counter() - began
        return data

    def save(self, key: bytes, data: memoryview) -> None:
        """Copy the bytes; a thread writes them. A full queue drops them."""
        began = time.perf_counter()
        is_taken = self._is_open and self._queue.save(key, data)
        with self._lock:
            self._stats.num_dropped += not is_taken
            self._stats.save_seconds += time.perf_counter() - began

    def holds(self, key: bytes) -> bool:
        """Whether the block waits to be written, or a file stands in its place."""
        if not self._is_open:
            return False
        return self._queue.find(key) is not None or (not self._queue.hides(key) and self._blocks.has(key))

    def drop(self, keys: Iterable[bytes]) -> None:
        """Hide blocks now, and have their files removed."""
        keys = list(keys)
        if self._is_open:
            self._queue.drop(keys)
            self._fetcher.forget(keys)

    def reset(self) -> None:
        """Hide all blocks of this layout now, and have their files removed, also for other engines."""
        if self._is_open:
            self._queue.clear()
            self._fetcher.forget()

    def wait_until_written(self, seconds: float) -> bool:
        """Wait until all that was saved or dropped is carried out; False if it is not within `seconds`."""
        return not self._is_open or self._queue.wait_until_empty(seconds)

    def stats(self) -> KVConnectorStats:
        """A copy of the counters; blocks and bytes are those of the whole directory."""
        with self._lock:
            if self._is_open:
                stats, account = self._stats, self._blocks.account()
                stats.num_blocks, stats.num_bytes = account.num_files, account.num_bytes
                stats.max_bytes, stats.num_evicted = self._blocks.max_bytes, self._blocks.num_evicted
                stats.fetch_seconds = self._fetcher.seconds
            return msgspec.structs.replace(self._stats)

    def close(self) -> None:
        """Write all blocks that wait, and end the threads. The last user of shared memory removes all blocks there."""
        if not self._is_open:
            return
        is_written, is_read = self._queue.close(), self._fetcher.close()
        self.stats()
        self._is_open = False
        if is_written and is_read:  # else a thread still uses the directory
            self._blocks.close(is_temporary=self._is_shared_memory)

    def _is_far(self, key: bytes) -> bool:
        """Whether a fetch has something to read for this block."""
        return self._queue.find(key) is None and not self._fetcher.has(key) and self.holds(key)

    def _find(self, key: bytes) -> memoryview | None:
        if not self._is_open:
            return None
        waiting = self._queue.find(key)
        if waiting is not None:
            return memoryview(waiting)
        if self._queue.hides(key):
            return None
        fetched = self._fetcher.take(key)
        return fetched if fetched is not None else self._read(key, time.time_ns())

    def _read_ahead(self, key: bytes, used_ns: int) -> memoryview | None:
        if self._queue.hides(key) or self._queue.find(key) is not None:
            return None
        return self._read(key, used_ns)

    def _read(self, key: bytes, used_ns: int) -> memoryview | None:
        """Read a block; None if there is none, or a file that is not the block, which is reported."""
        try:
            return self._blocks.read(key, used_ns)
        except FileNotFoundError:
            return None
        except DamagedBlock as problem:
            self._refuse("damaged", f"block {key.hex()} is damaged: {problem}; it is removed")
            self._queue.drop([key])
        except (OSError, EOFError, MemoryError) as problem:
            self._refuse(_kind(problem), f"block {key.hex()} cannot be read: {_words(problem)}")
        return None

    def _refuse(self, kind: str, text: str) -> None:
        with self._lock:
            self._stats.num_refused += 1
        self._notices.warn(kind, text)

    def _count_stored(self, num_bytes: int) -> None:
        with self._lock:
            self._stats.num_saved += 1
            self._stats.num_saved_bytes += num_bytes

    def _count_fault(self, problem: BaseException, is_write: bool) -> None:
        with self._lock:
            self._stats.num_dropped += is_write
        what = "a block could not be written and is dropped" if is_write else "blocks could not be removed"
        self._notices.warn(f"{what} {_kind(problem)}", f"{what}: {_words(problem)}")


class DiskConnector(DirectoryConnector):
    """The connector "disk:DIRECTORY", whose blocks stay when engines end."""

    def __init__(self, argument: str, max_bytes: int | None = None) -> None:
        """`argument`: the directory. Raises `ConfigError` if it is empty."""
        if not argument:
            raise ConfigError("kv_connector='disk:' is not allowed: must name a directory, 'disk:DIRECTORY'.")
        path = Path(os.path.abspath(os.path.expanduser(argument)))
        super().__init__(f"disk:{argument}", path, max_bytes, is_shared_memory=False)


class SharedMemoryConnector(DirectoryConnector):
    """The connector "shm": one directory for all engines of this user here, until the last of them closes."""

    def __init__(self, argument: str = "", max_bytes: int | None = None) -> None:
        """`argument` is not read. Raises `ConfigError` if this machine has no file system in memory."""
        if not SHARED_MEMORY.is_dir():
            what = f"kv_connector='shm' needs {SHARED_MEMORY}, which this machine does not have"
            raise ConfigError(f"{what}: use 'host', or 'disk:DIRECTORY'.")
        super().__init__("shm", SHARED_MEMORY / f"{_PREFIX}{os.geteuid()}", max_bytes, is_shared_memory=True)


def _words(problem: BaseException) -> str:
    return getattr(problem, "strerror", None) or error_text(problem)


def _kind(problem: BaseException) -> str:
    return f"{type(problem).__name__} {getattr(problem, 'errno', '')}"
