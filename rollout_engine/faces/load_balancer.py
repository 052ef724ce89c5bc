"""Chooses replicas for callers that route their requests themselves."""

import threading
from collections.abc import Sequence
from typing import Any

from rollout_engine.base.errors import ConfigError, EngineDeadError, refused
from rollout_engine.faces.verb_methods import Face
from rollout_engine.fleet.plan.balancer import Balancer, BalancerStats, StrategyName
from rollout_engine.fleet.run.calls import Load
from rollout_engine.fleet.run.client import FleetClient
from rollout_engine.text.prompts import Prompt

_KINDS = "a RolloutService, an engine with num_replicas=2 or more, or a list of engines"
_SECONDS = 5.0
"""Seconds that an engine may take to report its cache usage."""


class LoadBalancer:
    """Chooses a replica of a service, or one of several engines, for each prompt.

    >>> balancer = LoadBalancer(service, ["prefix-aware", "requests"])
    >>> service.generate(prompt, params, replica_index=balancer.select_replica(prompt))

    A service itself routes requests without `replica_index`: see `RolloutService.launch(balancer=...)`. Over a
    list of engines, the number returned is an index into that list.

    Args:
        service_or_replicas: a `RolloutService` or another face over replicas, or a list of `LLM`, `LLMEngine`,
            `AsyncLLM` or `RolloutPolicy`.
        strategy: "prefix-aware", "requests", "kv-cache" or "round-robin", or several, in fallback order. See
            `rollout_engine.fleet.plan.balancer.Balancer`.
        prefix_length: tokens of a prompt that "prefix-aware" compares; more than all prompts share.
        overload_threshold: a replica with more than this times (mean + 8) requests is overloaded.

    Loads are counts that this process already has; only "kv-cache" over a list of engines asks each one. Raises
    `ConfigError`. Any thread may call it.
    """

    def __init__(
        self,
        service_or_replicas: Face | Sequence[Face],
        strategy: StrategyName | Sequence[StrategyName] = ("prefix-aware", "requests"),
        *,
        prefix_length: int = 8,
        overload_threshold: float = 1.5,
    ) -> None:
        self._balancer = Balancer(strategy, prefix_length=prefix_length, overload_threshold=overload_threshold)
        self._faces, self._fleet = _check_faces(service_or_replicas)
        self._asks_for_kv = "kv-cache" in ((strategy,) if isinstance(strategy, str) else strategy)
        self._lock = threading.Lock()
        self._serving: set[int] = set()

    def select_replica(self, prompt: Prompt | None = None) -> int:
        """Choose the replica for a prompt of any kind; without one, its prefix is unknown.

        The same prompts under the same loads lead to the same choices in every process. Raises `RequestError`, and
        `EngineDeadError` if no replica serves.
        """
        loads = self._loads()
        token_ids = [] if prompt is None else self._faces[0].frontend.inputs.token_ids_of(prompt)
        with self._lock:
            self._follow(loads)
            try:
                replica = self._balancer.choose(token_ids)
            except LookupError as problem:
                raise EngineDeadError(f"select_replica: {problem}") from None
            # Counted until the loads are read again, so that equally loaded ones take turns.
            self._balancer.set_load(replica, loads[replica].num_requests + 1, loads[replica].num_kv_tokens)
            return replica

    def get_stats(self) -> BalancerStats:
        """Counts of the choices made here so far, by the strategy that decided them, and the loads as they are now."""
        loads = self._loads()
        with self._lock:
            self._follow(loads)
            return self._balancer.stats

    def _follow(self, loads: dict[int, Load]) -> None:
        for replica in self._serving - loads.keys():
            self._balancer.remove(replica)
            self._balancer.set_load(replica, 0, 0)
        for replica in sorted(loads.keys() - self._serving):
            self._balancer.add(replica)
        for replica, load in loads.items():
            self._balancer.set_load(replica, *load)
        self._serving = set(loads)

    def _loads(self) -> dict[int, Load]:
        """Load of each replica that serves."""
        if self._fleet is not None:
            return self._fleet.calls.loads()
        return {
            index: Load(face.frontend.num_open(), self._num_kv_tokens(face) if self._asks_for_kv else 0)
            for index, face in enumerate(self._faces)
            if face.frontend.client.dead_error is None
        }

    def _num_kv_tokens(self, face: Face) -> int:
        info = face.frontend.client.info
        usage: float = face.frontend.client.call("get_cache_usage", {}).result(_SECONDS)
        return round(usage * info.num_blocks * info.block_size)


def _check_faces(given: Any) -> tuple[list[Face], FleetClient | None]:
    if isinstance(given, Face):
        client = given.frontend.client
        if isinstance(client, FleetClient):
            return [given], client
        raise ConfigError(f"LoadBalancer: this {type(given).__name__} has no replicas: give {_KINDS}.")
    if isinstance(given, list | tuple) and given and all(isinstance(each, Face) for each in given):
        return list(given), None
    raise ConfigError(refused("service_or_replicas", given, _KINDS))
