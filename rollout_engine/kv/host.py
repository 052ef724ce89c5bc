"""The connector "host": blocks in this process's memory, those used last."""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from rollout_engine.kv.bounds import default_bytes, free_memory
from rollout_engine.kv.connector import KVConnectorStats, KVLayout
from rollout_engine.kv.counters import Counters

ENTRY_BYTES = 256
"""Counted for each block in addition to its bytes: its key and its place in the table."""


class HostConnector:
    """Blocks as `bytes`, in the order of their last use. A block that is being loaded outlives its eviction.

    The blocks of a fetch count as used in reverse, so that the end of a chain of blocks leaves before its beginning:
    without its beginning a chain is of no use.
    """

    def __init__(self, argument: str = "", max_bytes: int | None = None) -> None:
        """`argument` is not read: the connector has no options of its own."""
        self.max_bytes = max_bytes if max_bytes is not None else default_bytes(free_memory())
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self._fetched: set[bytes] = set()
        """Blocks whose next load is the one that their fetch has counted as a use."""
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._counters = Counters()

    def open(self, layout: KVLayout) -> dict[str, str]:
        """Begin without blocks."""
        self.reset()
        return {"connector": "host", "namespace": layout.namespace}

    def meet(self, peers: Sequence[Mapping[str, str]]) -> None:
        """Do nothing: other processes cannot read this one's memory."""

    def fetch(self, keys: Sequence[bytes]) -> None:
        """Count blocks as used now. Returns None: all of them are near."""
        with self._lock:
            for key in reversed(keys):
                if key in self._blocks:
                    self._blocks.move_to_end(key)
                    self._fetched.add(key)

    def load(self, key: bytes) -> memoryview | None:
        """Bytes of a block, which counts as used now."""
        began = time.perf_counter()
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._use(key)
        data = None if block is None else memoryview(block)
        self._counters.count_load(data, began)
        return data

    def save(self, key: bytes, data: memoryview) -> None:
        """Keep a copy; blocks that were not used for the longest time leave for it. One above the bound is dropped."""
        began = time.perf_counter()
        size = len(data) + ENTRY_BYTES
        with self._lock:
            if key in self._blocks:
                return
            try:
                self._make_room(size)  # before the copy, which takes the memory that is given back
                self._blocks[key] = bytes(data)
            except MemoryError:
                self._counters.add(num_dropped=1)
            else:
                self._num_bytes += size
                self._counters.count_stored(len(data))
        self._counters.add(save_seconds=time.perf_counter() - began)

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
            self._fetched.clear()
            self._num_bytes = 0

    def stats(self) -> KVConnectorStats:
        """A copy of the counters."""
        with self._lock:
            sizes = dict(num_blocks=len(self._blocks), num_bytes=self._num_bytes, max_bytes=self.max_bytes)
            return self._counters.copy(**sizes)

    def close(self) -> None:
        """Forget all blocks."""
        self.reset()

    def _use(self, key: bytes) -> None:
        if key in self._fetched:
            self._fetched.discard(key)
        else:
            self._blocks.move_to_end(key)

    def _remove(self, key: bytes) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self._num_bytes -= len(block) + ENTRY_BYTES
            self._fetched.discard(key)

    def _make_room(self, size: int) -> None:
        """Evict blocks until `size` bytes fit. Raises `MemoryError` if they never do."""
        if size > self.max_bytes:
            raise MemoryError
        while self._num_bytes + size > self.max_bytes:
            self._remove(next(iter(self._blocks)))
            self._counters.add(num_evicted=1)
