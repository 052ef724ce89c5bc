"""The driver's handle of a core that a Ray actor starts on its node (`rollout_engine.fleet.ray.actor`).

Ray restarts neither actors nor calls: a restarted actor would hold the base weights unnoticed.
"""

import logging
import threading
import time
from contextlib import suppress
from typing import Any

import msgspec

from rollout_engine.base.class_names import import_path
from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import EngineDeadError, RetryableError
from rollout_engine.children.failure import Failure
from rollout_engine.cluster.ray_answers import cause, read_answer
from rollout_engine.cluster.ray_cluster import Bundle, RayCluster
from rollout_engine.fleet.ray.actor import ENVIRONMENT, Beat, CoreOrder, CorePlace, ReplicaActor
from rollout_engine.process.keys import Keys
from rollout_engine.process.process_client import HEARTBEAT_SECONDS, MAX_BACKLOG_BYTES
from rollout_engine.process.wire import PROTOCOL

logger = logging.getLogger("rollout_engine")

_HEARTBEAT, _CONTROL = "heartbeat", "control"
"""Concurrency groups of the actor: a thread each, so that these calls overtake a start."""
_PLACE_SECONDS = 60.0
"""How long a replica waits for others to free resources."""
_ANSWER_SECONDS = 15.0
"""How long an actor may take to answer a call that is quick: the core has 5 s to end before it is killed."""
_RETRY_SECONDS = 0.1


class RemoteCore:
    """The driver's handle of an actor and its core. Any thread may use it."""

    def __init__(self, cluster: RayCluster, bundle: Bundle, name: str, namespace: str) -> None:
        self.name = name
        self._cluster, self._bundle, self._namespace = cluster, bundle, namespace
        self._group: Any = None
        self._actor: Any = None
        self._lock, self._is_ended = threading.Lock(), False

    @property
    def is_ended(self) -> bool:
        """Whether it is about to free its resources, or has done so."""
        return self._is_ended

    def start(self, config: EngineConfig, keys: Keys, seconds: float) -> CorePlace:
        """Reserve a node's resources, create the actor there, have it start its core, and wait until that is ready.

        Raises the error that prevented it within `seconds`: `ConfigError`, `RetryableError`, `EngineDeadError`.
        """
        deadline = time.monotonic() + seconds
        group = self._cluster.place(self._bundle, self.name, min(_PLACE_SECONDS, seconds), lambda: self._is_ended)
        with self._lock:
            if self._is_ended:
                self._cluster.release(group)
                raise EngineDeadError(f"{self.name} was ended before it started.")
            self._group, self._actor = group, self._make_actor(group)
        seconds = max(deadline - time.monotonic(), 0.0)
        order = CoreOrder(
            protocol=PROTOCOL,
            config=config,
            import_path=import_path(),
            log_level=logger.getEffectiveLevel(),
            heartbeat_seconds=HEARTBEAT_SECONDS,
            max_backlog_bytes=MAX_BACKLOG_BYTES,
            start_seconds=seconds,
            driver_node_id=self._cluster.node_id,
            keys=keys,
        )
        place = self._ask_start(msgspec.msgpack.encode(order), deadline + _ANSWER_SECONDS)
        if isinstance(place, Failure):
            raise place.as_error("start-up")
        return place

    def ask_heartbeat(self) -> Any:
        """Ask the actor for a sign of life. Returns Ray's reference to it, for `read_heartbeat`."""
        self._require_connection()
        return self._actor.heartbeat.options(concurrency_group=_HEARTBEAT).remote()

    def read_heartbeat(self, reference: Any) -> Beat | None:
        """Read an answer to `ask_heartbeat`; None: it has not arrived.

        Raises `EngineDeadError` if the actor is gone, `RetryableError` if it cannot be reached just now.
        """
        self._require_connection()
        ready, _ = self._cluster.ray.wait([reference], timeout=0)
        return self._read(reference, _ANSWER_SECONDS, Beat) if ready else None

    def end(self, *, kill: bool = False) -> None:
        """End the core and its actor, and free their placement group. Calling it again is a no-op; it never raises."""
        with self._lock:
            if not self._is_ended:
                self._is_ended = True
                self._end(kill)

    def _ask_start(self, order: bytes, deadline: float) -> CorePlace | Failure:
        """Have the actor start its core; ask again if the answer is lost, since it may not have started."""
        while True:
            answer = self._actor.start.remote(order)
            left = max(deadline - time.monotonic(), 0.0)
            try:
                found: CorePlace | Failure = self._read(answer, left, CorePlace | Failure)
            except TimeoutError as problem:
                raise EngineDeadError(f"{problem} It is ended.") from None
            except RetryableError as problem:
                if time.monotonic() > deadline:
                    raise
                logger.warning("%s It is asked again.", problem)
                time.sleep(_RETRY_SECONDS)
            else:
                return found

    def _read(self, reference: Any, seconds: float, kind: Any) -> Any:
        return read_answer(self._cluster.ray, reference, seconds, kind, self.name)

    def _require_connection(self) -> None:
        """Raise `EngineDeadError` if the connection to the cluster was closed, and every actor ended with it."""
        if not self._cluster.is_connected:
            raise EngineDeadError(f"{self.name}: the connection to the Ray cluster was closed, which ends its actor.")

    def _make_actor(self, group: Any) -> Any:
        ray = self._cluster.ray
        options = dict(
            name=self.name,
            namespace=self._namespace,
            num_cpus=self._bundle.num_cpus,
            num_gpus=self._bundle.num_devices,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={_HEARTBEAT: 1, _CONTROL: 1},
            runtime_env={"env_vars": ENVIRONMENT},
            scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group),
        )
        return ray.remote(**options)(ReplicaActor).remote()

    def _end(self, kill: bool) -> None:
        if self._actor is None:
            return
        ray = self._cluster.ray
        if self._cluster.is_connected:
            self._ask_to_end(kill)
            with suppress(ray.exceptions.RayError, ValueError):  # it is gone already
                ray.kill(self._actor, no_restart=True)
            with suppress(ray.exceptions.RayError):
                self._cluster.release(self._group)

    def _ask_to_end(self, kill: bool) -> None:
        """Have the actor end its core and wait for it. A core whose actor is gone, or killed, ends with it."""
        ray = self._cluster.ray
        try:
            answer = self._actor.end.options(concurrency_group=_CONTROL).remote(kill)
            ray.get(answer, timeout=_ANSWER_SECONDS)
        except ray.exceptions.GetTimeoutError:
            logger.warning("%s: its actor has not answered for %g s and is killed", self.name, _ANSWER_SECONDS)
        except ray.exceptions.RayError as problem:  # the actor is gone
            logger.debug("%s: %s", self.name, cause(problem))
