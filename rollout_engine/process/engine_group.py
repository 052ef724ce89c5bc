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
        self._starting: dict[str, int] = {}
        """Descriptors of memories that engines open as they start, by their paths."""

    def take_place(self, rank: int) -> GroupSettings:
        """The settings of an engine that starts now; call `settle` with them once it has, or has failed.

        If an engine had this place, the group is formed anew: the engines of before end. Raises `ConfigError`.
        """
        if self.size == 1:
            return GroupSettings(size=1)
        if self._memory is None or rank in self._started:
            self.close()
            self._memory = make_group_memory(self.size)
        self._started.add(rank)
        own = os.dup(self._memory)  # it outlasts a group that is formed anew meanwhile
        settings = GroupSettings(size=self.size, rank=rank, memory=f"/proc/{os.getpid()}/fd/{own}")
        self._starting[settings.memory] = own
        return settings

    def settle(self, settings: GroupSettings, *, has_started: bool) -> None:
        """Note whether an engine has started with these settings; if not, the others of its group end."""
        own = self._starting.pop(settings.memory, None)
        if own is not None:
            if not has_started:
                mark_engine_broken(own, settings.rank)
            os.close(own)

    def close(self) -> None:
        """Have the engines in the memory end, and forget it."""
        memory, self._memory = self._memory, None
        if memory is not None:
            for rank in self._started:
                mark_engine_broken(memory, rank)
            os.close(memory)
        self._started.clear()
