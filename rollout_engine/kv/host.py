"""The connector "host": blocks in this process's memory, those used last."""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import psutil

from rollout_engine.kv.connector import KVConnectorStats, KVLayout

DEFAULT_BYTES = 4 << 30
"""Bound if the user gives none, unless a quarter of the free memory is less."""
ENTRY_BYTES = 256
"""Counted for each block in addition to its bytes: its key and its place in the table."""


class HostConnector:
    """Blocks as `bytes`, in the order of their last use. A block that is being loaded outlives its eviction."""

    def __init__(self, argument: str = "", max_bytes: int | None = None) -> None:
        """`argument` is not read: the connector has no options of its own."""
        self.max_bytes = max_bytes if max_bytes is not None else default_bytes(psutil.virtual_memory().available)
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._stats = KVConnectorStats(max_bytes=self.max_bytes)

    def open(self, layout: KVLayout) -> dict[str, str]:
        """Forget blocks of any other layout."""
        self.reset()
        return {"connector": "host", "namespace": layout.namespace}

    def meet(self, peers: Sequence[Mapping[str, str]]) -> None:
        """Do nothing: other processes cannot read this one's memory."""

    def fetch(self, keys: Sequence[bytes]) -> None:
        """Return None: all blocks are near."""
        return None

    def load(self, key: bytes) -> memoryview | None:
        """Bytes of a block, which counts as used now."""
        began = time.perf_counter()
        with self._lock:
            block = self._blocks.get(key)
            if block is None:
                self._stats.num_misses += 1
            else:
                self._blocks.move_to_end(key)
                self._stats.num_loaded += 1
                self._stats.num_loaded_bytes += len(block)
            self._stats.load_seconds += time.perf_counter() - began
        return None if block is None else memoryview(block)

    def save(self, key: bytes, data: memoryview) -> None:
        """Keep a copy; blocks that were not used for the longest time leave for it. One above the bound is dropped."""
        began = time.perf_counter()
        size = len(data) + ENTRY_BYTES
        if size > self.max_bytes:
            with self._lock:
                self._stats.num_dropped += 1
            return
        with self._lock:
            self._remove(key)
            self._make_room(size)  # before the copy: its memory is taken again
        try:
            block = bytes(data)
        except MemoryError:
            with self._lock:
                self._stats.num_dropped += 1
            return
        with self._lock:
            self._remove(key)
            self._make_room(size)
            self._blocks[key] = block
            self._num_bytes += size
            self._stats.num_saved += 1
            self._stats.num_saved_bytes += len(block)
            self._stats.save_seconds += time.perf_counter() - began

    def holds(self, key: bytes) -> bool:
        """Whether the block is held."""
        return key in self._blocks

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget these blocks."""
        with self._lock:
            for key in keys:
                self._remove(key)

    def reset(self) -> None:
        """Forget all blocks."""
        with self._lock:
            self._blocks.clear()
            self._num_bytes = 0

    def stats(self) -> KVConnectorStats:
        """A copy of the counters."""
        with self._lock:
            return msgspec.structs.replace(self._stats, num_blocks=len(self._blocks), num_bytes=self._num_bytes)

    def close(self) -> None:
        """Forget all blocks."""
        self.reset()

    def _remove(self, key: bytes) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self._num_bytes -= len(block) + ENTRY_BYTES

    def _make_room(self, size: int) -> None:
        while self._num_bytes + size > self.max_bytes:
            _, block = self._blocks.popitem(last=False)
            self._num_bytes -= len(block) + ENTRY_BYTES
            self._stats.num_evicted += 1


def default_bytes(num_free: int) -> int:
    """Bound of a store if the user gives none: 4 GiB, or a quarter of the free bytes if that is less."""
    return min(DEFAULT_BYTES, num_free // 4)
