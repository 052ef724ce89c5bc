"""Ranks on the nodes of a Ray cluster: an actor for each, which starts the rank's process on its node."""

import secrets
import time
from contextlib import suppress
from typing import Any

import msgspec

from rollout_engine.base.class_names import import_path
from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, EngineDeadError, RetryableError
from rollout_engine.cluster.ray_answers import cause, read_answer
from rollout_engine.cluster.ray_cluster import Bundle, RayCluster
from rollout_engine.execution.rank_actor import RankActor, RankOrder, RankPlace
from rollout_engine.execution.rank_launcher import MODULE
from rollout_engine.execution.rank_wire import RankSettings
from rollout_engine.execution.remote_ranks import (
    TOKEN_VARIABLE,
    RemoteLauncher,
    RemoteProcess,
    Rendezvous,
    arguments_of,
)

_NAMESPACE = "rollout-engine"
_END, _CONTROL = "end", "control"
_PLACE_SECONDS = 60.0
"""How long ranks may wait for room."""
_BEGIN_SECONDS = 120.0
"""How long an actor may take to begin its rank's process."""
_ANSWER_SECONDS = 10.0
_RETRY_SECONDS = 1.0


class RayLauncher(RemoteLauncher):
    """Starts the ranks from 1 on in a Ray cluster, near one another if there is room."""

    def __init__(self, config: EngineConfig, num_threads: int) -> None:
        """Reserve the room. `num_threads`: of each rank.

        Raises `ConfigError`: Ray is missing, no cluster answers, or it is too small; `RetryableError` if there is
        no room now.
        """
        num_ranks, on_device = config.tensor_parallel_size, config.device == "cuda"
        self._bundle = Bundle(1 if on_device and config.num_threads is None else num_threads, int(on_device))
        self._cluster = RayCluster(None, _NAMESPACE, asked="executor='ray'")
        self._name = f"{_NAMESPACE}-ranks-{secrets.token_hex(4)}"
        self._group: Any = None
        try:
            asked = f"tensor_parallel_size={num_ranks} with executor='ray'"
            self._group = self._cluster.place_together(
                self._bundle, num_ranks - 1, self._name, _PLACE_SECONDS, asked=asked
            )
            super().__init__(self._cluster.ray.util.get_node_ip_address(), num_ranks)
            self._actors = {rank: self._actor(rank) for rank in range(1, num_ranks)}  # their processes begin together
        except BaseException:
            self._leave()
            raise

    def begin(self, settings: RankSettings, place: Rendezvous) -> RemoteProcess:
        actor, name = self._actors[settings.rank], self._name_of(settings.rank)
        return _RayProcess(self._cluster, actor, name, self._order(settings, place))

    def close(self) -> None:
        super().close()
        self._leave()

    def _leave(self) -> None:
        """Free the room, which ends the actors there."""
        if self._group is not None:
            with suppress(self._cluster.ray.exceptions.RayError):
                self._cluster.release(self._group)
        self._cluster.leave()

    def _name_of(self, rank: int) -> str:
        return f"{self._name}-{rank}"

    def _actor(self, rank: int) -> Any:
        ray = self._cluster.ray
        scheduling = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=rank - 1
        )
        options = dict(
            name=self._name_of(rank),
            namespace=_NAMESPACE,
            num_cpus=self._bundle.num_cpus,
            num_gpus=self._bundle.num_devices,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={_END: 1, _CONTROL: 1},
            scheduling_strategy=scheduling,
        )
        return ray.remote(**options)(RankActor).remote()

    def _order(self, settings: RankSettings, place: Rendezvous) -> bytes:
        variables = {TOKEN_VARIABLE: place.token, "OMP_NUM_THREADS": str(settings.num_threads)}
        arguments = arguments_of(place, settings.rank, self.meeting.num_ranks)
        return msgspec.msgpack.encode(RankOrder(MODULE, arguments, variables, import_path()))


class _RayProcess:
    """A rank's process, held by an actor. Satisfies `RemoteProcess`."""

    def __init__(self, cluster: RayCluster, actor: Any, name: str, order: bytes) -> None:
        self._cluster, self._actor, self._name = cluster, actor, name
        self._has_ended = False
        place = self._begin_process(order)
        self.name = f"process {place.pid} on node {cluster.node_name(place.node_id)}"
        self._status = actor.wait_end.options(concurrency_group=_END).remote()

    def has_ended(self) -> bool:
        if not self._cluster.is_connected:
            return True
        ready, _ = self._cluster.ray.wait([self._status], timeout=0)
        return bool(ready)

    def how_it_ended(self) -> str:
        if not self._cluster.is_connected:
            return "with the connection to the Ray cluster, which was closed"
        try:
            return f"with status {read_answer(self._cluster.ray, self._status, _ANSWER_SECONDS, int, self._name)}"
        except (TimeoutError, RetryableError):
            return "or its node cannot be reached"
        except (EngineDeadError, ConfigError) as problem:
            return f"with its actor ({cause(problem)})"

    def end(self) -> None:
        if self._has_ended or not self._cluster.is_connected:
            return
        self._has_ended, ray = True, self._cluster.ray
        with suppress(ray.exceptions.RayError):  # the actor is gone, or hangs
            ray.get(self._actor.end.options(concurrency_group=_CONTROL).remote(), timeout=_ANSWER_SECONDS)
        with suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._actor, no_restart=True)

    def _begin_process(self, order: bytes) -> RankPlace:
        """Have the actor begin the process; ask again if the answer is lost: an actor starts one process."""
        deadline = time.monotonic() + _BEGIN_SECONDS
        while True:
            asked, left = self._actor.start.remote(order), max(deadline - time.monotonic(), 0.0)
            try:
                found: RankPlace = read_answer(self._cluster.ray, asked, left, RankPlace, self._name)
                return found
            except TimeoutError as problem:
                raise EngineDeadError(f"{problem} It is ended.") from None
            except RetryableError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)
