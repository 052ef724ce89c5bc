"""The processes of engines that divide the experts of a mixture, and the memory that they share while all live."""

import os

from rollout_engine.execution.group_executor import GroupSettings, make_group_memory, mark_engine_broken


class EngineGroup:
    """A group of `size` engines. Its starter makes one call at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory: int | None = None
        self._started: set[int] = set()
        """Places of engines that were started in this memory."""

    def take_place(self, rank: int) -> GroupSettings:
        """The settings of an engine that starts now; release them with `settle` once it has.

        If an engine had this place, the group is formed anew: the engines of before end. Raises `ConfigError`.
        """
        if self.size == 1:
            return GroupSettings(size=1)
        if self._memory is None or rank in self._started:
            self.close()
            self._memory = make_group_memory(self.size)
        self._started.add(rank)
        return GroupSettings(size=self.size, rank=rank, descriptor=os.dup(self._memory))

    @staticmethod
    def settle(settings: GroupSettings, *, has_started: bool) -> None:
        """Note whether an engine has started with these settings; if not, the others of its group end."""
        if settings.descriptor >= 0:
            if not has_started:
                mark_engine_broken(settings.descriptor, settings.rank)
            os.close(settings.descriptor)

    def close(self) -> None:
        """Have the engines in the memory end, and forget it."""
        memory, self._memory = self._memory, None
        if memory is not None:
            for rank in self._started:
                mark_engine_broken(memory, rank)
            os.close(memory)
        self._started.clear()
