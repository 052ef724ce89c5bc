"""Starts the ranks of several stages on this machine, with the sockets between them."""

import os
import socket
from collections.abc import Iterator, Sequence

import torch

from rollout_engine.execution.rank_launcher import LocalLauncher, Rank
from rollout_engine.execution.rank_wire import RankSettings
from rollout_engine.model.ranks.pipe_memory import PipePlan, socket_pair
from rollout_engine.model.ranks.pipe_place import join_pipe


class PipeLauncher(LocalLauncher):
    """Starts the ranks of all stages. Rank 0, which is this process, is of the last one."""

    def __init__(self, plan: PipePlan) -> None:
        """Raises `ConfigError` as `LocalLauncher`."""
        self._plan = plan
        self._ends: dict[int, list[socket.socket]] = {rank: [] for rank in range(plan.num_ranks)}
        """For each rank that was not started yet: the socket before its stage first, then those behind it."""
        super().__init__(plan.num_ranks, has_group=False, device=torch.device("cpu"))

    def start(self, settings: Sequence[RankSettings]) -> Iterator[Rank]:
        for rank in super().start(settings):
            self._close_ends(rank.rank)  # the rank has them now
            yield rank

    def close(self) -> None:
        for rank in list(self._ends):
            self._close_ends(rank)
        if self.place is not None:
            self.place.pipe.close()
        super().close()

    def _share(self, memory: int, num_ranks: int) -> None:
        plan = self._plan
        os.ftruncate(memory, plan.total_bytes)
        behind: dict[int, list[socket.socket]] = {rank: [] for rank in self._ends}
        for stage in range(plan.num_stages - 1):
            for reader in plan.readers_of(stage):
                ours, theirs = socket_pair()
                behind[plan.writer_of(stage)].append(ours)
                self._ends[reader].append(theirs)
        for rank, ends in behind.items():
            self._ends[rank] += ends
        self.place = join_pipe(plan, memory, 0, self._ends.pop(0))
        self.meeting = self.place.team

    def _take_belts(self, rank: int) -> list[int]:
        return [end.fileno() for end in self._ends[rank]]

    def _close_ends(self, rank: int) -> None:
        for end in self._ends.pop(rank, []):
            end.close()
