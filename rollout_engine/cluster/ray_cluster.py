"""The connection of a process to a Ray cluster, and the room for replicas there."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, RetryableError

_LOCAL = (None, "auto", "local")
"""Addresses by which Ray finds a cluster itself, or starts one on this machine."""
_PROBE_SECONDS = 5.0
_REPORT_SECONDS = 3.0
"""Free resources are reported by the nodes, some time after they were freed."""
_POLL_SECONDS = 0.1
_WAIT_SECONDS = 0.5
"""How often a replica that waits for room checks whether it is still wanted."""
_MAX_NODES_SHOWN = 8


class Bundle(NamedTuple):
    """Resources that one replica reserves, all on one node."""

    num_cpus: int
    num_devices: int

    @classmethod
    def for_config(cls, config: EngineConfig) -> Self:
        """One CPU for each thread of the model's forward; on devices a device and a CPU for each rank.

        Ranks that Ray places reserve their own.
        """
        ranks = 1 if config.executor == "ray" else config.num_ranks
        on_device = config.device == "cuda"
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
        return _format_resources(self.resources)


class RayCluster:
    """A user of the process's connection to a Ray cluster. The last user closes it, unless the program opened it."""

    _lock = threading.Lock()
    _num_users = 0
    _is_ours = False

    def __init__(self, address: str | None, namespace: str, *, asked: str = 'placement="ray"') -> None:
        """Connect, unless the process is connected. Raises `ConfigError`: Ray is missing, or no cluster answers.

        `asked`: the user's setting that needs Ray.
        """
        self.ray = import_ray(asked)
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
        """Raise `ConfigError` unless the nodes hold `count` bundles when they are otherwise idle."""
        if (room := _room(bundle, self._sizes())) < count:
            raise ConfigError(self._no_room(bundle, count, self._free(), f"room for {room} even in an idle cluster"))

    def num_cpus_each(self, count: int) -> int:
        """The most CPUs that each of `count` bundles can have on otherwise idle nodes; 0: not even one."""
        nodes = self._sizes()
        most = int(max((resources.get("CPU", 0.0) for resources in nodes.values()), default=0.0))
        return next((num_cpus for num_cpus in range(most, 0, -1) if _room(Bundle(num_cpus, 0), nodes) >= count), 0)

    def place(self, bundle: Bundle, name: str, seconds: float, is_ended: Callable[[], bool]) -> Any:
        """Reserve a bundle on one node. Returns Ray's placement group.

        Raises `RetryableError` if none is free within `seconds`, or before `is_ended()`.
        """
        group = self.ray.util.placement_group([bundle.resources], strategy="STRICT_PACK", name=name)
        if not self._is_ready(group, seconds, is_ended):
            outcome = f"no node had room for one within {seconds:.0f} s"
            raise RetryableError(self._no_room(bundle, 1, self._free(), outcome))
        return group

    def place_together(self, bundle: Bundle, count: int, name: str, seconds: float, *, asked: str) -> Any:
        """Reserve `count` bundles, on as few nodes as hold them. Returns Ray's placement group.

        Raises `ConfigError` if the nodes are too small, and `RetryableError` if too few bundles are free within
        `seconds`; `asked`: the user's setting.
        """
        wanted = (
            f"{asked} does not fit into the Ray cluster. Asked: {bundle} for each rank but the first, {count} times"
        )
        if (room := _room(bundle, self._sizes())) < count:
            raise ConfigError(
                f"{wanted}; there is room for {room} even where nothing else runs. Lower it, set num_threads lower, or "
                "add nodes."
            )
        group = self.ray.util.placement_group([bundle.resources] * count, strategy="PACK", name=name)
        if not self._is_ready(group, seconds, lambda: False):
            free = self._shown_room(self._free())
            raise RetryableError(f"{wanted}. Free: {free}; that did not change within {seconds:.0f} s. Try it again.")
        return group

    def _is_ready(self, group: Any, seconds: float, is_ended: Callable[[], bool]) -> bool:
        """Whether a placement group has its room within `seconds`, and before `is_ended()`; if not, it is released."""
        is_ready, deadline = False, time.monotonic() + seconds
        try:
            while not (is_ready := group.wait(_WAIT_SECONDS)) and time.monotonic() < deadline and not is_ended():
                pass
        finally:
            if not is_ready:
                self.release(group)
        return is_ready

    def release(self, group: Any) -> None:
        """Free the reserved resources of a placement group; actors in it end."""
        if self.is_connected:
            self.ray.util.remove_placement_group(group)

    def _sizes(self) -> dict[str, dict[str, float]]:
        """All resources of each living node, by its id."""
        return {node["NodeID"]: node["Resources"] for node in self.ray.nodes() if node["Alive"]}

    def _free(self) -> dict[str, dict[str, float]]:
        """Free resources of each living node, by its id."""
        return dict(self.ray._private.state.available_resources_per_node())

    def _no_room(self, bundle: Bundle, count: int, free: Mapping[str, Mapping[str, float]], outcome: str) -> str:
        return (
            f"num_replicas={count} does not fit into the Ray cluster. Asked: {bundle} on one node for each replica. "
            f"Free: {self._shown_room(free)}; {outcome}. Ask for fewer replicas, set num_threads "
            "lower, or add nodes."
        )

    def _shown_room(self, free: Mapping[str, Mapping[str, float]]) -> str:
        shown = [
            f"{self.node_name(node_id)}: {_format_resources(free[node_id])}"
            for node_id in list(free)[:_MAX_NODES_SHOWN]
        ]
        if len(free) > _MAX_NODES_SHOWN:
            shown.append(f"{len(free) - _MAX_NODES_SHOWN} more nodes")
        return "; ".join(shown) or "no living node"


def variables_of_children() -> dict[str, str]:
    """Variables by which a child of this process finds the cluster that it is connected to, if it is."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or "RAY_ADDRESS" in os.environ:
        return {}
    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def import_ray(asked: str = 'placement="ray"') -> Any:
    """Import Ray. Raises `ConfigError` if it is not installed; `asked`: the user's setting that needs it."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as problem:
        raise ConfigError(
            f'{asked} needs Ray, which cannot be imported ({problem}): pip install "rollout-engine[ray]".'
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


def _format_resources(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU"))
