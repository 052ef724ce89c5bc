"""Numbers and barriers that ranks on several machines exchange by a gloo group of their hosts."""

import torch

from rollout_engine.kernels.cpu.turns import BrokenTurnsError
from rollout_engine.model.ranks.exchange import WINDOW_BYTES, Meeting
from rollout_engine.model.ranks.group_exchange import JOIN_SECONDS
from sync.errors import SyncError
from sync.gloo import connect_patient, run_patiently
from sync.groups import GroupConfig, WeightGroup


class GroupMeeting(Meeting):
    """One rank's end. Each rank has a window of its own.

    Args:
        rendezvous: "tcp://host:port", by which the hosts of this engine, and nothing else, find one another.
    """

    window_is_shared = False

    def __init__(self, rendezvous: str, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self.window = torch.empty(WINDOW_BYTES, dtype=torch.uint8)
        self._joining = WeightGroup(GroupConfig(rendezvous, rank, num_ranks, JOIN_SECONDS), connect_patient)

    def meet(self) -> None:
        self.agree(0)

    def agree(self, number: int) -> list[int]:
        found = torch.empty(self.num_ranks, dtype=torch.int64)
        own = torch.tensor([number], dtype=torch.int64)
        try:
            run_patiently(self._joining, lambda group: group._allgather_base(found, own))
        except (SyncError, RuntimeError) as problem:
            raise BrokenTurnsError(f"the hosts of the ranks are not connected: {problem}") from problem
        return [int(each) for each in found]

    def break_(self) -> None:
        self._joining.leave()
