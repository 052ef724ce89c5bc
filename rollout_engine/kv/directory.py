"""The connectors "shm" and "disk:DIRECTORY": blocks as files that engines of one user share.

A `QueuedConnector` over a `BlockDirectory`; fetches verify blocks. Files in memory are mapped. Those on a disk are
read: a mapped page whose disk fails would end the process.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollout_engine.base.errors import ConfigError, error_text
from rollout_engine.kv.block_directory import BlockDirectory
from rollout_engine.kv.block_frame import DamagedBlock
from rollout_engine.kv.connector import KVConnectorStats, KVLayout
from rollout_engine.kv.queued_connector import QueuedConnector

SHARED_MEMORY = Path("/dev/shm")
"""File system in memory, in which "shm" makes its directory."""
_PREFIX = "rollout_kv_"
"""Prefix of its name; those of other directories of engines, which are swept, begin otherwise."""
_NEAR_BYTES = 1 << 30
"""Most bytes that were read from a disk and not loaded yet; less for a small store."""
_PROBED_KEYS = 64
"""Blocks that a fetch looks for before it wakes the thread."""


class DirectoryConnector(QueuedConnector):
    """Blocks in a directory of this user's. See `DiskConnector` and `SharedMemoryConnector`."""

    def __init__(self, name: str, path: Path, max_bytes: int | None, *, is_shared_memory: bool) -> None:
        """`name`: as the user gave it, for errors and log lines."""
        super().__init__(name)
        self._name, self._path, self._asked_bytes = name, path, max_bytes
        self._is_shared_memory = is_shared_memory
        self._gauges: dict[str, float] = {}
        """Figures of the directory when it was last looked at."""

    def open(self, layout: KVLayout) -> dict[str, str]:
        """Open the directory, made if it is absent. Raises `ConfigError` if it is not this user's alone."""
        try:
            blocks = BlockDirectory(self._path, layout.namespace, self._asked_bytes, is_mapped=self._is_shared_memory)
        except OSError as problem:
            raise ConfigError(
                f"kv_connector={self._name!r}: the directory {self._path} cannot be used: {_words(problem)}. Give a "
                "directory that is this user's alone (mode 0700), or one that is not there yet."
            ) from problem
        self._blocks, self._namespace = blocks, layout.namespace
        try:
            self._start(blocks, blocks.max_bytes // 2 if self._is_shared_memory else min(_NEAR_BYTES, blocks.max_bytes))
        except BaseException:
            blocks.close()
            raise
        return {"connector": self._name, "namespace": layout.namespace, "directory": str(self._path)}

    def meet(self, peers: Sequence[Mapping[str, str]]) -> None:
        """Log a warning if an engine of the fleet cannot share blocks with this one."""
        for peer in peers:
            if peer.get("namespace") != self._namespace:
                text = "an engine of the fleet has blocks of another layout, so the two share none"
                self._notices.warn("namespace", text)

    def stats(self) -> KVConnectorStats:
        """A copy of the counters; blocks and bytes are those of the whole directory."""
        if not self._is_open:
            return self._counters.copy(**self._gauges)
        account = self._blocks.account()
        self._gauges = dict(
            num_blocks=account.num_files,
            num_bytes=account.num_bytes,
            max_bytes=self._blocks.max_bytes,
            num_evicted=self._blocks.num_evicted,
            fetch_seconds=self._fetcher.seconds,
        )
        return self._counters.copy(**self._gauges)

    def close(self) -> None:
        """Write all blocks that wait, and end the threads. The last user of shared memory removes all blocks there."""
        if self._is_open:
            self.stats()
            if self._end():  # else a thread still uses the directory
                self._blocks.close(is_temporary=self._is_shared_memory)

    def _choose_far(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys[:_PROBED_KEYS] if self._is_far(key)] + list(keys[_PROBED_KEYS:])

    def _is_far(self, key: bytes) -> bool:
        return self._queue.find(key) is None and not self._fetcher.has(key) and self.holds(key)

    def _is_stored(self, key: bytes) -> bool:
        return self._blocks.has(key)

    def _read_now(self, key: bytes) -> memoryview | None:
        return self._read(key, time.time_ns())

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
            kind, text = self._describe(problem)
            self._refuse(kind, f"block {key.hex()} cannot be read: {text}")
        return None

    def _describe(self, problem: BaseException) -> tuple[str, str]:
        return f"{type(problem).__name__} {getattr(problem, 'errno', '')}", _words(problem)


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
