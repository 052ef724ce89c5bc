"""The connection of a process to a Ray cluster, and the room for replicas there."""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch

from rollout_engine.config import EngineConfig
from rollout_engine.errors import ConfigError, RetryableError

_LOCAL = (None, "auto", "local")
"""Addresses by which Ray finds a cluster itself, or starts one on this machine."""
_PROBE_SECONDS = 5.0
_REPORT_SECONDS = 3.0
"""Free resources are reported by the nodes, some time after they were freed."""
_POLL_SECONDS = 0.1
_WAIT_SECONDS = 0.5
"""How often a replica that waits for room looks whether it still wants it."""
_MAX_NODES_SHOWN = 8


class Bundle(NamedTuple):
    """Resources that one replica reserves, all on one node."""

    num_cpus: int
    num_devices: int

    @classmethod
    def for_config(cls, config: EngineConfig) -> Self:
        """One CPU for each thread of the model's forward; on devices a device and a CPU for each rank."""
        ranks, on_device = config.tensor_parallel_size, config.device == "cuda"
        if config.num_threads is not None:
            return cls(config.num_threads * ranks, ranks * on_device)
        return cls(ranks if on_device else max(ranks, torch.get_num_threads()), ranks * on_device)

    @property
    def resources(self) -> dict[str, float]:
        """These resources by their names in Ray."""
        devices = {"GPU": float(self.num_devices)} if self.num_devices else {}
        return {"CPU": float(self.num_cpus)} | devices

    def times_in(self, resources: Mapping[str, float]) -> int:
        """How many such bundles these resources hold."""
        return int(min(resources.get(name, 0.0) // amount for name, amount in self.resources.items()))

    def __str__(self) -> str:
        return _shown(self.resources)


class RayCluster:
    """A user of the process's connection to a Ray cluster. The last user closes it, unless the program opened it."""

    _lock = threading.Lock()
    _num_users = 0
    _is_ours = False

    def __init__(self, address: str | None, namespace: str) -> None:
        """Connect, unless the process is connected. Raises `ConfigError`: Ray is missing, or no cluster answers."""
        self.ray = import_ray()
        with self._lock:
            if self.ray.is_initialized():
                _require_same(self.ray, address)
            else:
                _connect(self.ray, address, namespace)
                RayCluster._is_ours, RayCluster._num_users = True, 0
            RayCluster._num_users += 1
        self.node_id: str = self.ray.get_runtime_context().get_node_id()
        """Ray's id of the node this process is on."""

    @property
    def is_connected(self) -> bool:
        """Whether the process is still connected. Ask before each use: Ray starts a new cluster otherwise."""
        return bool(self.ray.is_initialized())

    def leave(self) -> None:
        """Give up the connection. Call it once."""
        with self._lock:
            RayCluster._num_users -= 1
            if RayCluster._num_users == 0 and RayCluster._is_ours:
                RayCluster._is_ours = False
                self.ray.shutdown()

    def node_name(self, node_id: str) -> str:
        """A node's name for people: the one it was given, by default its IP address, and the start of its id."""
        names = {node["NodeID"]: node["NodeName"] for node in self.ray.nodes()}
        return f"{names.get(node_id, 'unknown')} ({node_id[:8]})"

    def require_room(self, bundle: Bundle, count: int) -> None:
        """Raise `ConfigError` unless `count` bundles are free now."""
        deadline = time.monotonic() + _REPORT_SECONDS
        while (room := _room(bundle, free := self._free())) < count:
            if time.monotonic() > deadline:
                raise ConfigError(self._no_room(bundle, count, free, f"room for {room}"))
            time.sleep(_POLL_SECONDS)

    def require_size(self, bundle: Bundle, count: int) -> None:
        """Raise `ConfigError` unless the nodes hold `count` bundles when nobody else uses them."""
        if (room := _room(bundle, self._sizes())) < count:
            raise ConfigError(self._no_room(bundle, count, self._free(), f"room for {room} even in an idle cluster"))

    def num_cpus_each(self, count: int) -> int:
        """The most CPUs that each of `count` bundles can have when nobody else uses the nodes; 0: not even one."""
        nodes = self._sizes()
        most = int(max((resources.get("CPU", 0.0) for resources in nodes.values()), default=0.0))
        return next((num_cpus for num_cpus in range(most, 0, -1) if _room(Bundle(num_cpus, 0), nodes) >= count), 0)

    def place(self, bundle: Bundle, name: str, seconds: float, is_ended: Callable[[], bool]) -> Any:
        """Reserve a bundle on one node. Returns Ray's placement group.

        Raises `RetryableError` where none is free within `seconds`, or before `is_ended()`.
        """
        group = self.ray.util.placement_group([bundle.resources], strategy="STRICT_PACK", name=name)
        try:
            deadline = time.monotonic() + seconds
            while not (is_ready := group.wait(_WAIT_SECONDS)) and time.monotonic() < deadline and not is_ended():
                pass
            if not is_ready:
                outcome = f"no node had room for one within {seconds:.0f} s"
                raise RetryableError(self._no_room(bundle, 1, self._free(), outcome))
        except BaseException:
            self.release(group)
            raise
        return group

    def release(self, group: Any) -> None:
        """Free what a placement group reserved; actors in it end."""
        if self.is_connected:
            self.ray.util.remove_placement_group(group)

    def _sizes(self) -> dict[str, dict[str, float]]:
        """All resources of each living node, by its id."""
        return {node["NodeID"]: node["Resources"] for node in self.ray.nodes() if node["Alive"]}

    def _free(self) -> dict[str, dict[str, float]]:
        """Free resources of each living node, by its id."""
        return dict(self.ray._private.state.available_resources_per_node())

    def _no_room(self, bundle: Bundle, count: int, free: Mapping[str, Mapping[str, float]], outcome: str) -> str:
        shown = [f"{self.node_name(node_id)}: {_shown(free[node_id])}" for node_id in list(free)[:_MAX_NODES_SHOWN]]
        if len(free) > _MAX_NODES_SHOWN:
            shown.append(f"{len(free) - _MAX_NODES_SHOWN} more nodes")
        return (
            f"num_replicas={count} does not fit into the Ray cluster. Asked: {bundle} on one node for each replica. "
            f"Free: {'; '.join(shown) or 'no living node'}; {outcome}. Ask for fewer replicas, set num_threads "
            "lower, or add nodes."
        )


def import_ray() -> Any:
    """Import Ray. Raises `ConfigError` where it is not installed."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as problem:
        raise ConfigError(
            f'placement="ray" needs Ray, which cannot be imported ({problem}): pip install "rollout-engine[ray]".'
        ) from problem
    return ray


def _connect(ray: Any, address: str | None, namespace: str) -> None:
    """Connect this process to the cluster at `address`. Raises `ConfigError`."""
    where = address if address not in _LOCAL else os.environ.get("RAY_ADDRESS") or address
    if where is not None and "://" in where:
        raise ConfigError(
            f"address={where!r} is not allowed: must be HOST:PORT of the cluster's head. Ray's client (ray://) leaves "
            "this process outside the cluster: start the program on one of its nodes."
        )
    try:
        if where not in _LOCAL:
            _probe(str(where))
        ray.init(address=address, namespace=namespace, include_dashboard=False)
    except Exception as problem:
        if where in (None, "local"):
            raise ConfigError(f"Ray cannot start a cluster here: {_words(problem)}.") from problem
        raise ConfigError(
            f"address={where!r}: no Ray cluster can be used there: {_words(problem)}. Start one (ray start --head), "
            "give the address it prints, or leave address out to start one on this machine."
        ) from problem


def _probe(address: str) -> None:
    """Raise `OSError` or `ValueError` unless something listens at HOST:PORT: Ray itself waits a minute for it."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("expected HOST:PORT")
    socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()


def _require_same(ray: Any, address: str | None) -> None:
    """Raise `ConfigError` if this process is connected to another cluster than the one at `address`."""
    if address in _LOCAL:
        return
    current = ray.get_runtime_context().gcs_address
    try:
        asked = ray._private.services.canonicalize_bootstrap_address(address)
    except (ValueError, OSError) as problem:
        raise ConfigError(f"address={address!r} is not allowed: must be HOST:PORT ({_words(problem)}).") from problem
    if asked != current:
        raise ConfigError(
            f"address={address!r}: this process is connected to the Ray cluster at {current} already. Leave address "
            "out to use that one, or call ray.shutdown() first."
        )


def _room(bundle: Bundle, nodes: Mapping[str, Mapping[str, float]]) -> int:
    """How many bundles fit, each on one node."""
    return sum(bundle.times_in(resources) for resources in nodes.values())


def _words(problem: BaseException) -> str:
    first_line = str(problem).strip().partition("\n")[0].rstrip(".")
    return f"{type(problem).__name__}: {first_line}"


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU"))
