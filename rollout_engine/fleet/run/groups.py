"""Replicas that divide the experts of a mixture: groups of processes of this machine, `data_parallel_size` at first.

When an engine of a group ends, the others end themselves, and the fleet starts all of them again. A fleet that is
scaled gets a new group of another size.
"""

import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError
from rollout_engine.fleet.run.processes import ProcessProvider, ProcessReplica, with_threads
from rollout_engine.fleet.run.provider import Provider
from rollout_engine.process.engine_group import EngineGroup


class _Family(NamedTuple):
    """The replicas of one group, by their indexes."""

    indexes: tuple[int, ...]
    group: EngineGroup

    @classmethod
    def of(cls, indexes: Sequence[int]) -> "_Family":
        return cls(tuple(indexes), EngineGroup(len(indexes)))


class GroupProvider(ProcessProvider):
    """A `ProcessProvider` whose replicas form groups."""

    def __init__(self, size: int, **options: float) -> None:
        super().__init__(**options)
        self._lock = threading.Lock()
        self._families = [_Family.of(range(size))]

    @classmethod
    def of(cls, config: EngineConfig, num_replicas: int, provider: Provider | None) -> "GroupProvider":
        """The provider of a fleet with this configuration, in place of `provider`, by default of processes.

        Raises `ConfigError` for one of other machines, and for several replicas, whose number is the group's.
        """
        size = config.data_parallel_size
        if num_replicas not in (1, size):
            what = f"data_parallel_size={size} and num_replicas={num_replicas} are both set"
            raise ConfigError(f"{what}: a group of engines that divide experts is one fleet. Leave num_replicas out.")
        if provider is not None and type(provider) is not ProcessProvider:
            what = f"data_parallel_size={size} and placement='ray', or another place, are both set"
            raise ConfigError(f"{what}: engines that divide experts are processes of one machine. Give one of them.")
        return cls(size)

    def plan(self, indexes: Sequence[int]) -> None:
        """Have the replicas of these indexes, which start later, form a group."""
        with self._lock:
            for family in self._families[:-1]:  # those before the last one were scaled away
                family.group.close()
            self._families = [self._families[-1], _Family.of(indexes)]

    def share(self, config: EngineConfig, num_replicas: int) -> EngineConfig:
        """The same configuration: threads depend on the size of the group that an engine starts in."""
        return config

    def start(self, index: int, config: EngineConfig) -> ProcessReplica:
        """Start an engine in its group, and wait until its model is loaded."""
        with self._lock:
            family = next((each for each in self._families if index in each.indexes), None)
            if family is None:
                raise ConfigError(f"Replica {index} belongs to a group that was scaled away.")
            settings = family.group.take_place(family.indexes.index(index))
        config = with_threads(config, len(os.sched_getaffinity(0)) // settings.size)
        has_started = False
        try:
            replica = self._start(index, config, group=settings)
            has_started = True
        finally:
            family.group.settle(settings, has_started=has_started)
        return replica

    def shutdown(self) -> None:
        """Free the memories of all groups."""
        with self._lock:
            for family in self._families:
                family.group.close()
