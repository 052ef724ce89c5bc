"""Copies of published weights on the nodes of a Ray cluster: one for each node and publication, made by an actor there.

The bytes go through Ray's object store as arrays of uint8, put there once however many nodes want them, and are dropped
when the copies are made.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollout_engine.base.errors import WeightUpdateError, as_weight_errors
from rollout_engine.children.failure import Failure
from rollout_engine.cluster.ray_answers import read_answer
from rollout_engine.cluster.ray_cluster import RayCluster
from rollout_engine.fleet.ray.actor import ENVIRONMENT
from rollout_engine.fleet.ray.store_actor import StoreActor, StoreOrder, StorePlace
from rollout_engine.process.wire import PROTOCOL
from sync.manifest import WeightManifest
from sync.published import Lease, Pointer, checked_manifest, lease_current, opened_tensor

logger = logging.getLogger("rollout_engine")

_PIECE_BYTES = 64 << 20
_END_SECONDS = 15.0
"""How long an actor may take to remove its copy."""

_Publication = tuple[str, Pointer]


class NodeStores:
    """The driver's handle of the copies. Any thread may use it."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._copies: dict[tuple[str, str], _Copy] = {}
        """By Ray's id of the node, and the directory here."""
        self._shared: dict[_Publication, _Shared] = {}
        """Publications that are being copied."""

    def near(self, node_id: str, directory: str, seconds: float) -> str:
        """Path on a node of the current version of the store at `directory` here: copied there, if it has no copy yet.

        Raises `WeightUpdateError`, `EngineDeadError` or `RetryableError` if it cannot be copied within `seconds`.
        """
        with as_weight_errors():
            lease = lease_current(Path(directory))
        publication = directory, lease.pointer
        with self._lock:
            copy = self._copies.setdefault((node_id, directory), _Copy(self._cluster, node_id))
        with copy.lock:  # the other replicas of that node wait for the first one's copy
            if copy.publication != publication:
                with self._sharing(publication) as shared:
                    copy.make(publication, *shared.in_object_store(self._cluster.ray, lease), seconds)
            return copy.directory

    def close(self) -> None:
        """Remove all copies and end their actors."""
        with self._lock:
            copies, self._copies = self._copies, {}
        for copy in copies.values():
            copy.end()

    @contextmanager
    def _sharing(self, publication: _Publication) -> Iterator["_Shared"]:
        with self._lock:
            shared = self._shared.setdefault(publication, _Shared())
            shared.num_users += 1
        try:
            yield shared
        finally:
            with self._lock:
                shared.num_users -= 1
                if shared.num_users == 0:
                    del self._shared[publication]


class _Shared:
    """A publication in the object store, for as long as this is held."""

    def __init__(self) -> None:
        self.num_users = 0
        self._lock = threading.Lock()
        self._found: tuple[WeightManifest, list[Any]] | None = None

    def in_object_store(self, ray: Any, lease: Lease) -> tuple[WeightManifest, list[Any]]:
        """Its manifest, and Ray's references to its pieces."""
        with self._lock:
            if self._found is None:
                with as_weight_errors():
                    manifest = checked_manifest(lease)
                    self._found = manifest, [ray.put(piece) for piece in _pieces(lease, manifest)]
            return self._found


class _Copy:
    """The copy on one node, and the actor that has it."""

    def __init__(self, cluster: RayCluster, node_id: str) -> None:
        self._cluster, self._node_id = cluster, node_id
        self._actor: Any = None
        self.lock = threading.Lock()
        self.publication: _Publication | None = None
        """The publication that is copied."""
        self.directory = ""
        """Directory of the copy, on that node."""

    def make(self, publication: _Publication, manifest: WeightManifest, pieces: list[Any], seconds: float) -> None:
        """Copy a publication. After a failure the next attempt begins with a new actor."""
        name = f"The copy of the weights on node {self._cluster.node_name(self._node_id)}"
        order = msgspec.msgpack.encode(StoreOrder(protocol=PROTOCOL, manifest=manifest, piece_bytes=_PIECE_BYTES))
        try:
            if self._actor is None:
                self._actor = self._make_actor()
            answer = self._actor.copy.remote(order, pieces)
            place = read_answer(self._cluster.ray, answer, seconds, StorePlace | Failure, name)
            if isinstance(place, Failure):
                raise place.as_error(name)
        except TimeoutError as problem:
            self.end()
            raise WeightUpdateError(f"{problem} Give a longer timeout.") from None
        except BaseException:
            self.end()
            raise
        self.publication, self.directory = publication, place.directory
        logger.info("%s: version %d, %d bytes", name, manifest.version, manifest.num_bytes)

    def end(self) -> None:
        """Remove the copy and end the actor. It never raises."""
        actor, self._actor, self.publication = self._actor, None, None
        if actor is None or not self._cluster.is_connected:
            return
        ray = self._cluster.ray
        with suppress(ray.exceptions.RayError):  # it is gone already
            ray.get(actor.end.remote(), timeout=_END_SECONDS)
        with suppress(ray.exceptions.RayError, ValueError):
            ray.kill(actor, no_restart=True)

    def _make_actor(self) -> Any:
        ray = self._cluster.ray
        on_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(self._node_id, soft=False)
        options = dict(
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": ENVIRONMENT},
            scheduling_strategy=on_node,
        )
        return ray.remote(**options)(StoreActor).remote()


def _pieces(lease: Lease, manifest: WeightManifest) -> Iterator[np.ndarray]:
    """The bytes of all tensors in a row, cut into arrays of uint8."""
    left = manifest.num_bytes
    piece, filled = np.empty(min(left, _PIECE_BYTES), dtype=np.uint8), 0
    for spec in manifest.tensors:
        with opened_tensor(lease, spec) as fetch:
            start = 0
            while start < spec.num_bytes:
                count = min(spec.num_bytes - start, len(piece) - filled)
                fetch(piece.data[filled : filled + count], start)
                start, filled = start + count, filled + count
                if filled == len(piece):
                    yield piece
                    left -= filled
                    piece, filled = np.empty(min(left, _PIECE_BYTES), dtype=np.uint8), 0
