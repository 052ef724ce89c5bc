"""Counters of a connector that any thread may change."""

import threading
import time

import msgspec

from rollout_engine.kv.connector import KVConnectorStats


class Counters:
    """Adds to the numbers of `KVConnectorStats`, and copies them."""

    def __init__(self) -> None:
        self._stats = KVConnectorStats()
        self._lock = threading.Lock()

    def add(self, **amounts: float) -> None:
        """Add to counters, given by their names."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._stats, name, getattr(self._stats, name) + amount)

    def count_load(self, data: memoryview | None, began: float) -> None:
        """Count a load, begun at `began` by `time.perf_counter`, and the bytes that it returned."""
        found = dict(num_misses=1) if data is None else dict(num_loaded=1, num_loaded_bytes=len(data))
        self.add(**found, load_seconds=time.perf_counter() - began)

    def count_stored(self, num_bytes: int) -> None:
        """Count a block that was stored."""
        self.add(num_saved=1, num_saved_bytes=num_bytes)

    def copy(self, **gauges: float) -> KVConnectorStats:
        """The counters now, with these values for others of its fields."""
        with self._lock:
            return msgspec.structs.replace(self._stats, **gauges)
