"""Replicas on a Ray cluster: one actor and one placement group each. Tokens and weights do not pass through Ray."""

import atexit
import itertools
import logging
import secrets
import threading

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, LifecycleError
from rollout_engine.cluster.ray_answers import SAME_VERSION
from rollout_engine.cluster.ray_cluster import Bundle, RayCluster
from rollout_engine.fleet.ray.actor import CorePlace
from rollout_engine.fleet.ray.core import RemoteCore
from rollout_engine.fleet.ray.stores import NodeStores
from rollout_engine.fleet.ray.watch import ActorWatch
from rollout_engine.fleet.run.processes import with_threads
from rollout_engine.process.core_launcher import config_digest, named_elsewhere
from rollout_engine.process.keys import Keys
from rollout_engine.process.process_client import HANG_SECONDS, START_SECONDS, ProcessClient
from sync.owner_process import OwnerProcess

logger = logging.getLogger("rollout_engine")


class RayReplica:
    """A `Replica` whose core was started by an actor."""

    def __init__(
        self, client: ProcessClient, node: str, node_id: str, core: RemoteCore, provider: "RayProvider"
    ) -> None:
        self.client, self.node = client, node
        self._node_id, self._core, self._provider, self._owner = node_id, core, provider, OwnerProcess()

    def near(self, store: str, seconds: float) -> str:
        """Path of the store itself, or of a copy of its current version on the replica's node, made at most once there.

        Raises `WeightUpdateError`, `EngineDeadError` or `RetryableError` if it cannot be copied within `seconds`.
        """
        return self._provider.near(self._node_id, store, seconds)

    def end(self, *, kill: bool = False) -> None:
        """Leave the core, end it and its actor, and free their reservations. `kill`: without waiting for the core.

        Calling it again is a no-op.
        """
        if self._owner.is_current:
            is_dead = self.client.dead_error is not None  # a core that hangs would use up its time to end
            self.client.shutdown()
            self._provider.end_core(self._core, kill=kill or is_dead)


class RayProvider:
    """A `Provider` of replicas on a Ray cluster. Any thread may call anything.

    Each replica has a STRICT_PACK placement group: as many CPUs as its core computes with, and a device for
    `device="cuda"`. A core on this process's node is reached by its unix socket, one on another node by TCP with CURVE
    keys of its own, which it gets in a call of Ray. The cluster is taken as it is: nothing waits for an autoscaler to
    add nodes. Several providers may share a cluster, in one process or in many.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        namespace: str = "rollout-engine",
        hang_seconds: float = HANG_SECONDS,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """Connect to the cluster at `address` ("HOST:PORT"), or to the one this process is connected to.

        `address=None`: as `ray.init()` does, a cluster that runs on this machine, or else a new one. `namespace`: that
        of the actors in Ray. `hang_seconds`: a core that gives no sign of life for this long counts as dead.
        `start_seconds`: how long a replica may take to find room, a minute of it at most, and to load its model.
        Raises `ConfigError`: Ray is not installed, or no cluster answers there.
        """
        self._namespace = namespace
        self._hang_seconds, self._start_seconds = hang_seconds, start_seconds
        self._cluster = RayCluster(address, namespace)
        self._stores = NodeStores(self._cluster)
        self._service = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._cores: dict[RemoteCore, int] = {}
        """Cores that are not gone, and the indexes of their replicas."""
        self._starting: set[RemoteCore] = set()
        self._lock = threading.Lock()
        self._is_closed = self._is_left = False
        self._owner = OwnerProcess()
        self._watch = ActorWatch(lambda core: self.end_core(core, kill=True))
        atexit.register(self.shutdown)  # before Ray's own, which it registered when it was imported

    def share(self, config: EngineConfig, num_replicas: int) -> EngineConfig:
        """The configuration of each of `num_replicas`: its share of the cluster's CPUs, unless `num_threads` is set.

        A core on a device keeps its own default.
        """
        self._require_open()
        return config if config.device == "cuda" else with_threads(config, self._cluster.num_cpus_each(num_replicas))

    def check(self, num_more: int, config: EngineConfig | None = None, num_present: int = 0) -> None:
        """Raise `ConfigError` unless the cluster has room for `num_more` replicas; it lists the room asked and free.

        Without their configuration it looks for one CPU each.
        """
        self._require_open()
        bundle = Bundle(1, 0) if config is None else Bundle.for_config(config)
        self._cluster.require_room(bundle, num_more)

    def start(self, index: int, config: EngineConfig) -> RayReplica:
        """Start a replica; return once its model is loaded and this process is connected to it.

        Raises `ConfigError`: the cluster is too small, or the model cannot be served. `RetryableError`: there is no
        room now. `EngineDeadError`: it died, or was not ready in time. `LifecycleError`: `shutdown` was called.
        """
        self._require_open()
        config, bundle = named_elsewhere(config), Bundle.for_config(config)
        name = f"{self._namespace}-{self._service}-{index}-{next(self._numbers)}"
        core = RemoteCore(self._cluster, bundle, name, self._namespace)
        with self._lock:
            self._require_open()
            others = sum(not each.is_ended and its != index for each, its in self._cores.items())
            self._cluster.require_size(bundle, others + 1)  # one of the same index was lost, and is about to be ended
            self._cores[core] = index
            self._starting.add(core)
        try:
            keys = Keys.make()
            place = core.start(config, keys, self._start_seconds)
            node = self._cluster.node_name(place.node_id)
            replica = RayReplica(self._connect(place, keys), node, place.node_id, core, self)
            _require_same(config, replica)
        except BaseException:
            self.end_core(core, kill=True)
            raise
        finally:
            self._starting.discard(core)
        self._watch.add(core)
        logger.info("%s: %s, core process %d on %s", name, replica.client.info.choices, place.pid, node)
        return replica

    def near(self, node_id: str, store: str, seconds: float) -> str:
        """Do as `RayReplica.near`, for the node of that id."""
        self._require_open()
        return store if node_id == self._cluster.node_id else self._stores.near(node_id, store, seconds)

    def end_core(self, core: RemoteCore, *, kill: bool) -> None:
        """End a core and its actor, and free their reservations."""
        self._watch.remove(core)
        core.end(kill=kill)
        self._cores.pop(core, None)

    def close(self) -> None:
        """Start nothing more, and end the replicas that are starting: their `start` raises."""
        with self._lock:
            self._is_closed = True
            starting = list(self._starting)
        for core in starting:
            core.end(kill=True)

    def shutdown(self) -> None:
        """End the replicas that are left, and leave the cluster, which ends if it was started for providers.

        Calling it again is a no-op.
        """
        if not self._owner.is_current:
            return
        with self._lock:
            if self._is_left:
                return
            self._is_closed = self._is_left = True
        atexit.unregister(self.shutdown)
        self._watch.close()
        for core in list(self._cores):
            self.end_core(core, kill=True)
        self._stores.close()
        self._cluster.leave()

    def _connect(self, place: CorePlace, keys: Keys) -> ProcessClient:
        """Connect to a core: by its unix socket on this node, else by TCP, encrypted with its own keys."""
        if place.node_id == self._cluster.node_id:
            return ProcessClient.connect(place.directory, hang_seconds=self._hang_seconds)
        return ProcessClient.connect(place.address, keys=keys, hang_seconds=self._hang_seconds)

    def _require_open(self) -> None:
        if self._is_closed:
            raise LifecycleError("start: the provider of replicas was shut down. Make a new one.")


def _require_same(config: EngineConfig, replica: RayReplica) -> None:
    """Raise `ConfigError` unless the core runs this configuration."""
    sent, found = config_digest(config), replica.client.config_digest
    if found != sent:
        replica.client.shutdown()
        what = f"The core on {replica.node} runs another configuration (digest {found}) than the fleet's ({sent})"
        raise ConfigError(f"{what}: {SAME_VERSION}")
