"""The executor of one engine of a group whose engines divide the experts of a mixture."""

import os
from collections.abc import Callable
from typing import Any

import msgspec

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError
from rollout_engine.execution.divided_worker import DividedWorker, LoneWorker
from rollout_engine.execution.executor import InlineExecutor
from rollout_engine.execution.profiler import Profiler
from rollout_engine.kernels.cpu import phases
from rollout_engine.model.ranks.expert_group import ExpertGroup
from rollout_engine.model.ranks.group_memory import GroupMemory, make_memory, mark_broken


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place of an engine in a group of `data_parallel_size`."""

    size: int
    """Number of engines; 1: this one has all experts."""
    rank: int = 0
    memory: str = ""
    """Path of the group's memory, which its starter has open; "": a group of one has none."""


def make_group_memory(size: int) -> int:
    """Make the memory of a group of `size` engines; returns the descriptor. Raises `ConfigError`."""
    return make_memory(size)


def mark_engine_broken(descriptor: int, rank: int) -> None:
    """Note in a group's memory that an engine has ended, so that the others end, too."""
    mark_broken(descriptor, rank)


class GroupExecutor(InlineExecutor):
    """An `InlineExecutor` whose steps are rounds of the group. Its weights are released when no engine needs them."""

    def __init__(self, worker: DividedWorker, **options: Any) -> None:
        super().__init__(worker, **options)
        self._divided = worker.group
        self.group = worker.group if worker.group.layers else None
        worker.begin_rounds()

    @classmethod
    def from_settings(cls, config: EngineConfig, settings: GroupSettings) -> InlineExecutor:
        """Load the model, with this engine's experts. Raises `ConfigError` if it cannot be served so."""
        if settings.size == 1:
            return LoneExecutor.from_config(config)
        if not phases.is_available():
            raise ConfigError(
                f"data_parallel_size={settings.size} needs the C++ kernels, which could not be built here. Install "
                "g++, or leave it out."
            )
        memory = os.open(settings.memory, os.O_RDWR | os.O_CLOEXEC)
        group = ExpertGroup(GroupMemory(memory, settings.size), settings.rank)
        return cls(DividedWorker(config, group), profiler=Profiler(config.profiler_dir))

    def watch(self, on_death: Callable[[str], object]) -> None:
        """Call `on_death`, on any thread, with the reason when another engine of the group has ended."""
        self._divided.watch(on_death)

    def leave_group(self) -> None:
        """Leave the group in order, before this process ends."""
        if self.group is not None:
            self.group.end()

    def release_weights(self, *, forget: bool) -> None:
        if self.group is not None:
            self.group.close(politely=True)
        super().release_weights(forget=forget)

    def restore_weights(self) -> None:
        super().restore_weights()
        if self.group is not None:
            self.group.open()

    def shutdown(self) -> None:
        """Drop the model and the KV pool, and leave the group."""
        self.leave_group()
        super().shutdown()


class LoneExecutor(InlineExecutor):
    """The executor of a group of one engine."""

    worker_class = LoneWorker
