"""Makes a rank's ends of everything that the ranks of several stages share."""

import mmap
import socket
from collections.abc import Sequence
from typing import NamedTuple

import torch

from rollout_engine.kernels.cpu.turns import Turns
from rollout_engine.model.ranks.pipe import Pipe
from rollout_engine.model.ranks.pipe_memory import Inbox, Outbox, PipePlan
from rollout_engine.model.ranks.shared_exchange import SharedExchange


class PipePlace(NamedTuple):
    """One rank's place."""

    team: SharedExchange
    """The exchange of all ranks."""
    exchange: SharedExchange
    """The exchange of the ranks of its stage."""
    pipe: Pipe


def join_pipe(plan: PipePlan, memory: int, rank: int, sockets: Sequence[socket.socket]) -> PipePlace:
    """The place of a rank.

    Args:
        memory: descriptor of a file of `plan.total_bytes` zeros that all ranks have open; it may be closed afterwards.
        sockets: the rank's ends of the belts: the one before its stage, unless that is the first, then one to each rank
            of the next stage, on the first rank of a stage that has a next one.
    """
    stage, ends = plan.stage_of(rank), list(sockets)
    inbox = None if stage == 0 else Inbox(plan.belt(memory, stage - 1), ends.pop(0))
    outbox = Outbox(plan.belt(memory, stage), ends) if ends else None
    team = SharedExchange(memory, rank, plan.num_ranks)
    exchange = SharedExchange(memory, rank % plan.ranks_of_stage, plan.ranks_of_stage, plan.exchange_start(stage))
    others = [_turns(plan, memory, each) for each in range(plan.num_stages)]
    return PipePlace(team, exchange, Pipe(stage, plan.num_stages, inbox=inbox, outbox=outbox, others=others))


def _turns(plan: PipePlan, memory: int, stage: int) -> Turns:
    """The barrier of a stage, at the beginning of its exchange."""
    page = mmap.mmap(memory, mmap.PAGESIZE, offset=plan.exchange_start(stage))
    return Turns(torch.frombuffer(page, dtype=torch.uint8), plan.ranks_of_stage)
