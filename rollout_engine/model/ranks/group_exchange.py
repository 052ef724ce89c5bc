"""Tensors that ranks exchange by a process group: between their devices, or between the CPUs of several machines.

On devices the group is NCCL's. An exchange is launched like a kernel there: the host does not wait for it, and later
work on the device finds its results. Between CPUs the group is gloo's, and the host waits. Values travel as bytes,
so none is rounded, unless they are added up. Numbers and barriers of the hosts are a `Meeting`'s.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout_engine.kernels.cpu.turns import BrokenTurnsError
from rollout_engine.model.ranks.exchange import Exchange, Meeting
from rollout_engine.model.ranks.share import Share
from sync.errors import SyncError
from sync.gloo import connect_patient, run_patiently
from sync.groups import GroupConfig, ProcessGroup, WeightGroup, c10d
from sync.nccl import connect_ahead

JOIN_SECONDS = 300.0
"""How long all ranks may take to find one another."""


class GroupExchange(Exchange):
    """One rank's end.

    Args:
        meeting: of the hosts.
        device: of this rank's tensors.
        rendezvous: "file:///path", or "tcp://host:port" across machines, by which all ranks of this engine, and
            nothing else, find one another.
    """

    def __init__(self, meeting: Meeting, device: torch.device, rendezvous: str) -> None:
        super().__init__(meeting.rank, meeting.num_ranks)
        self._meeting, self._device = meeting, device
        self.window, self.window_is_shared = meeting.window, meeting.window_is_shared
        connect = partial(connect_ahead, device=device) if device.type == "cuda" else connect_patient
        self._joining = WeightGroup(GroupConfig(rendezvous, self.rank, self.num_ranks, JOIN_SECONDS), connect)
        self._before_leaving: list[Callable[[], object]] = []

    def meet(self) -> None:
        self._meeting.meet()

    def agree(self, number: int) -> list[int]:
        return self._meeting.agree(number)

    def break_(self) -> None:
        self._meeting.break_()
        for call in self._before_leaving:
            call()
        self._joining.leave()

    def before_leaving(self, call: Callable[[], object]) -> None:
        """Have `break_` call this before it leaves the group, on any thread."""
        self._before_leaving.append(call)

    def gathering(self, share: Share) -> "Callable[[Tensor], Tensor]":
        return ColumnGather(self, share, self.agree(share.size))  # type: ignore[return-value]  # a tuple with `__call__`

    def gather_rows(self, part: Tensor, first: int, num_rows: int) -> Tensor:
        whole = part.new_zeros(num_rows, part.shape[1])
        whole[first : first + len(part)] = part
        return self._add_zeros(whole)

    def merge_rows(self, rows: Tensor, own: Tensor) -> Tensor:
        return self._add_zeros(torch.where(own[:, None], rows, torch.zeros_like(rows)))

    def add_up(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        if part.numel():
            self._run(lambda group: group.allreduce([part]))
        return part

    def gather(self, out: Tensor, part: Tensor) -> None:
        """Write every rank's `part` [...] to `out` [num_ranks, ...], both contiguous."""
        self._run(lambda group: group._allgather_base(_bytes_of(out), _bytes_of(part)))

    def copy_from_first(self, tensor: Tensor) -> None:
        """Overwrite a contiguous tensor by rank 0's."""
        content, options = tensor.view(-1).view(torch.uint8), c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._run(lambda group: group.broadcast([content], options))

    def _add_zeros(self, values: Tensor) -> Tensor:
        """Every element's bytes from the rank that has them; all others have zeros there."""
        if values.numel():
            self._run(lambda group: group.allreduce([_bytes_of(values)]))
        return values

    def _run(self, launch: Callable[[ProcessGroup], Any]) -> None:
        try:
            if self._device.type == "cuda":
                launch(self._joining.wait_for_ranks()).wait()
            else:
                run_patiently(self._joining, launch)
        except (SyncError, RuntimeError) as problem:
            raise BrokenTurnsError(f"the ranks are not connected: {problem}") from problem


class ColumnGather(NamedTuple):
    """Gathers [..., whole] of which every rank gives its columns [..., size]."""

    exchange: GroupExchange
    share: Share
    sizes: list[int]
    """Number of every rank's columns."""

    def __call__(self, part: Tensor) -> Tensor:
        rows, widest = part.reshape(-1, self.share.size), max(self.sizes)
        if self.share.size < widest:
            rows = F.pad(rows, (0, widest - self.share.size))
        parts = rows.new_empty(len(self.sizes), len(rows), widest)
        if len(rows):
            self.exchange.gather(parts, rows)
        columns = [each[:, :size] for each, size in zip(parts, self.sizes, strict=True)]
        return torch.cat(columns, dim=1).view(*part.shape[:-1], self.share.whole)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
