"""A KV connector over a Ray cluster: engines on any of its nodes find one another's blocks.

    kv_connector="rollout_engine.fleet.ray.block_connector:RayConnector"           or ...:RayConnector:HOST:PORT

    save ──> ray.put, BlockIndex.add          a block that another engine has is not put again
    fetch ──> BlockIndex.find ──> ray.get     from the other node's object store to this one's
    load <── fetched, or this engine's own    never from another node

Threads carry out the first two (`QueuedConnector`). It is loaded by its name, as a class of a user's: the engine checks
all that it returns.
"""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from rollout_engine.base.errors import ConfigError, error_text
from rollout_engine.cluster.ray_cluster import RayCluster
from rollout_engine.fleet.ray.block_index import NAMESPACE, Blocks, SharedIndex
from rollout_engine.kv.bounds import default_bytes
from rollout_engine.kv.connector import KVConnectorStats, KVLayout
from rollout_engine.kv.queued_connector import QueuedConnector

_MAX_LOOKUPS = 100_000
"""Blocks that were asked for and not read, because their fetch ended before: they are forgotten above this number."""
_GET_SECONDS = 10.0
_OWN_SECONDS = 1.0
"""How long a fetch waits for a block of another node, and a load for one of this engine's own."""


class RayConnector(QueuedConnector):
    """Blocks in Ray's object store, put there by the engines that computed them; each bounds its own."""

    def __init__(self, argument: str = "", max_bytes: int | None = None) -> None:
        """`argument`: HOST:PORT of the cluster's head; "": the cluster that Ray finds, or a new one on this machine."""
        super().__init__("RayConnector")
        self._address, self._asked_bytes = argument or None, max_bytes
        self._lookups: dict[bytes, _Lookup] = {}
        self._gauges: dict[str, float] = {}

    def open(self, layout: KVLayout) -> dict[str, str]:
        """Connect to the cluster, and find or make the index of this layout. Raises `ConfigError`."""
        asked = "kv_connector='...:RayConnector'"
        self._cluster = RayCluster(self._address, NAMESPACE, asked=asked)
        owner = secrets.token_hex(8)
        try:
            self._own = _OwnBlocks(self._cluster, layout.namespace, owner, self._asked_bytes)
            self._start(self._own, self._own.max_bytes)
        except self._cluster.ray.exceptions.RayError as problem:
            self._cluster.leave()
            raise ConfigError(f"{asked}: the index of blocks cannot be reached: {error_text(problem)}.") from problem
        except BaseException:
            self._cluster.leave()
            raise
        return {"owner": owner, "node": self._cluster.node_id}

    def meet(self, peers: Sequence[Mapping[str, str]]) -> None:
        """Do nothing: the index has the blocks of all engines."""

    def stats(self) -> KVConnectorStats:
        """A copy of the counters; blocks and bytes are this engine's own."""
        if self._is_open:
            self._gauges = self._own.gauges() | dict(fetch_seconds=self._fetcher.seconds)
        return self._counters.copy(**self._gauges)

    def close(self) -> None:
        """Take this engine's blocks out of the index, and leave the cluster."""
        if not self._is_open:
            return
        self.stats()
        self._end()
        with suppress(Exception):  # the index or the node is gone
            self._own.close()
        self._lookups.clear()
        self._cluster.leave()

    def _is_usable(self) -> bool:
        return self._is_open and self._cluster.is_connected

    def _choose_far(self, keys: Sequence[bytes]) -> list[bytes]:
        """The blocks that are not here, for which the index is asked now."""
        wanted = [key for key in keys if not self.holds(key)]
        if wanted:
            lookup = _Lookup(self._cluster.ray, wanted, self._own.index.begin_find(wanted))
            if len(self._lookups) > _MAX_LOOKUPS:
                self._lookups.clear()
            self._lookups |= dict.fromkeys(wanted, lookup)
        return wanted

    def _is_stored(self, key: bytes) -> bool:
        """Whether the block was fetched, or is this engine's own; the index is not asked."""
        return self._fetcher.has(key) or self._own.find(key) is not None

    def _read_now(self, key: bytes) -> memoryview | None:
        return self._get(key, self._own.find(key), _OWN_SECONDS)

    def _read_ahead(self, key: bytes, used_ns: int) -> memoryview | None:
        lookup = self._lookups.pop(key, None)
        if lookup is None or not self._is_usable() or self._queue.hides(key):
            return None
        try:
            reference = lookup.find(key)
        except Exception as problem:
            self._notices.warn("index", f"the index of blocks did not answer: {_first_line(problem)}")
            with suppress(Exception):  # if it is gone, this makes a new one
                self._own.index.has(key)
            return None
        data = self._get(key, reference, _GET_SECONDS)
        if reference is not None and data is None:
            with suppress(Exception):  # the next engine that asks finds that it is lost
                self._own.index.forget([key], of_any=True)
        return data

    def _get(self, key: bytes, reference: Any, seconds: float) -> memoryview | None:
        if reference is None:
            return None
        try:
            return memoryview(self._cluster.ray.get(reference, timeout=seconds)).cast("B").toreadonly()
        except Exception as problem:  # its engine or node is gone, or too slow; or it is no array
            self._refuse("lost", f"block {key.hex()} cannot be had: {_first_line(problem)}")
            return None

    def _describe(self, problem: BaseException) -> tuple[str, str]:
        return "", _first_line(problem)


class _Lookup:
    """The answer of the index to one fetch, waited for by the first block that is read."""

    def __init__(self, ray: Any, keys: Sequence[bytes], answer: Any) -> None:
        self._ray, self._keys, self._answer = ray, keys, answer
        self._references: dict[bytes, Any] | None = None

    def find(self, key: bytes) -> Any:
        """Reference of a block; None if no engine has it. Raises Ray's errors."""
        if self._references is None:
            found = self._ray.get(self._answer, timeout=_GET_SECONDS)
            self._references = dict(zip(self._keys, found, strict=True))
        return self._references[key]


class _OwnBlocks:
    """The blocks that this engine has put into the object store: those saved last. Satisfies `Store`."""

    def __init__(self, cluster: RayCluster, layout: str, owner: str, max_bytes: int | None) -> None:
        self._ray = cluster.ray
        self._blocks: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._num_bytes = self._num_evicted = 0
        self.max_bytes = max_bytes if max_bytes is not None else default_bytes(_store_bytes(cluster))
        self.index = SharedIndex(cluster, layout, owner, self._all)

    def find(self, key: bytes) -> Any:
        """Reference of a block; None if it is not this engine's own."""
        found = self._blocks.get(key)
        return None if found is None else found[0]

    def gauges(self) -> dict[str, float]:
        """Blocks and bytes now, by their names in `KVConnectorStats`."""
        return dict(
            num_blocks=len(self._blocks),
            num_bytes=self._num_bytes,
            max_bytes=self.max_bytes,
            num_evicted=self._num_evicted,
        )

    def write(self, key: bytes, data: bytes) -> bool:
        """Put a block, and forget those saved first for its room; False if an engine has it. Raises Ray's errors."""
        if len(data) > self.max_bytes:
            raise MemoryError(f"{len(data)} bytes have no room within the bound of {self.max_bytes} bytes")
        if self.index.has(key):
            return False
        self._make_room(len(data))
        reference = self._ray.put(np.frombuffer(data, dtype=np.uint8))
        with self._lock:
            self._blocks[key] = reference, len(data)
            self._num_bytes += len(data)
        self.index.add([key], [reference])
        return True

    def remove(self, key: bytes) -> None:
        """Forget a block, whichever engine has it. Raises Ray's errors."""
        self._forget(key)
        self.index.forget([key], of_any=True)

    def clear(self) -> None:
        """Forget all blocks of the layout. Raises Ray's errors."""
        for key in list(self._blocks):
            self._forget(key)
        self.index.clear()

    def close(self) -> None:
        """Take this engine's blocks out of the index. Raises Ray's errors."""
        keys = list(self._blocks)
        for key in keys:
            self._forget(key)
        self.index.forget(keys)

    def _all(self) -> Blocks:
        with self._lock:
            return list(self._blocks), [reference for reference, _ in self._blocks.values()]

    def _forget(self, key: bytes) -> None:
        with self._lock:
            _, num_bytes = self._blocks.pop(key, (None, 0))
            self._num_bytes -= num_bytes

    def _make_room(self, num_bytes: int) -> None:
        gone = []
        while self._num_bytes + num_bytes > self.max_bytes:
            gone.append(next(iter(self._blocks)))
            self._forget(gone[-1])
        if gone:
            self._num_evicted += len(gone)
            self.index.forget(gone)


def _first_line(problem: BaseException) -> str:
    return error_text(problem).splitlines()[0]


def _store_bytes(cluster: RayCluster) -> int:
    """Bytes of the object store of this node."""
    nodes = {node["NodeID"]: node["Resources"] for node in cluster.ray.nodes()}
    return int(nodes.get(cluster.node_id, {}).get("object_store_memory", 0.0))
