"""A rank's process, started by a `RankLauncher`:

    python -m rollout_engine.execution.rank_main MEMORY LIFE STEPS CALLS PULSE BELTS... NUM_RANKS  descriptors
    python -m rollout_engine.execution.rank_main --connect HOST PORT RANK NUM_RANKS       on another machine

MEMORY is that of all ranks, and LIFE, STEPS, CALLS and PULSE are this rank's ends of the sockets of `rank_wire`;
BELTS are its ends of those between stages, if there are several (`model.ranks.pipe_place`). It ends when rank 0 does,
and takes part in no more when any rank has ended.
"""

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from rollout_engine.base.threads import give_way_early, start_thread
from rollout_engine.children.channel import Channel
from rollout_engine.children.failure import Failure, failure_of
from rollout_engine.execution.rank_pulse import start_pulse
from rollout_engine.execution.rank_values import pack_value
from rollout_engine.execution.rank_wire import (
    MAX_BYTES,
    NUM_SOCKETS,
    Answer,
    Call,
    Done,
    Joined,
    RankSettings,
    Started,
    StepMessage,
)
from rollout_engine.execution.rank_worker import RankWorker
from rollout_engine.execution.remote_ranks import Channels, connect, place_of
from rollout_engine.kernels.cpu.turns import BrokenTurnsError
from rollout_engine.model.backends import device_of, exchange_of
from rollout_engine.model.ranks.exchange import Exchange
from rollout_engine.model.ranks.group_meeting import GroupMeeting
from rollout_engine.model.ranks.pipe_memory import PipePlan, adopt
from rollout_engine.model.ranks.pipe_place import join_pipe
from rollout_engine.model.ranks.seat import Seat
from rollout_engine.model.ranks.shared_exchange import SharedExchange

logger = logging.getLogger("rollout_engine")

_OTHERS_FIRST_SECONDS = 0.3
"""Seconds before a rank that was left in a step reports it: the end of another rank, noticed meanwhile, is clearer."""


def serve(memory: int | None, channels: Channels, num_ranks: int, belts: Sequence[int] = ()) -> int:
    """Load this rank's part and take part until rank 0 ends. Returns the exit status.

    `memory`: descriptor of the memory that all ranks share; None on another machine. `belts`: those between stages.
    """
    life, steps, calls, _ = channels
    settings = life.receive(RankSettings)
    logging.basicConfig(level=settings.log_level, format=f"rank {settings.rank}: %(message)s")
    start_thread(_end_with, life, name="rank-0")
    if memory is None:  # paths of its own machine precede them
        sys.path.extend(entry for entry in settings.import_path if entry not in sys.path)
    else:
        sys.path[:] = settings.import_path
    try:
        device = device_of(settings.config)
        life.send(Joined.of(device.torch_device))
        seat = _seat(settings, memory, num_ranks, belts)
    except BaseException as error:
        life.send(failure_of(error))
        return 1
    try:
        worker = RankWorker(settings, seat)
        if seat.pipe is not None:
            seat.pipe.serve()
        life.send(Started(worker.regions))
    except BaseException as error:
        seat.break_()
        if not isinstance(error, BrokenTurnsError):
            life.send(failure_of(error))
        return 1
    start_thread(_take_part, worker, seat, life, steps, name="steps")
    try:
        while True:
            _answer(worker, calls)
    except (EOFError, OSError):
        worker.close()
    return 0


def _seat(settings: RankSettings, memory: int | None, num_ranks: int, belts: Sequence[int]) -> Seat:
    if settings.config.pipeline_parallel_size == 1:
        splits_sums = device_of(settings.config).splits_sums(settings.config)
        return Seat(_exchange(settings, memory, num_ranks), splits_sums=splits_sums)
    assert memory is not None, "stages share memory"
    config = settings.config
    plan = PipePlan(config.pipeline_parallel_size, config.tensor_parallel_size)
    place = join_pipe(plan, memory, settings.rank, [adopt(each) for each in belts])
    os.close(memory)
    return Seat(place.exchange, team=place.team, pipe=place.pipe)


def _exchange(settings: RankSettings, memory: int | None, num_ranks: int) -> Exchange:
    device, meeting = device_of(settings.config), settings.meeting
    if memory is None:
        assert meeting is not None, "hosts without shared memory meet somewhere"
        return exchange_of(device, GroupMeeting(meeting, settings.rank, num_ranks), settings.rendezvous)
    shared = SharedExchange(memory, settings.rank, num_ranks)
    os.close(memory)
    return exchange_of(device, shared, settings.rendezvous)


def _answer(worker: RankWorker, calls: Channel) -> None:
    call: Call = calls.receive(Call)
    try:
        result: Done | Failure = Done(pack_value(worker.carry_out(call.method, call.arguments)))
    except Exception as error:
        result = failure_of(error)
    calls.send(Answer(call.number, result))


def _take_part(worker: RankWorker, seat: Seat, life: Channel, steps: Channel) -> None:
    try:
        while True:
            worker.take_part(steps.receive(StepMessage))
    except (EOFError, OSError):
        return
    except BrokenTurnsError as error:
        time.sleep(_OTHERS_FIRST_SECONDS)
        with contextlib.suppress(OSError):
            life.send(failure_of(error))
        _leave(1)
    except BaseException as error:
        logger.critical("a step failed", exc_info=error)
        seat.break_()
        life.send(failure_of(error))
        _leave(1)


def _end_with(life: Channel) -> None:
    """Wait for the end of rank 0, which sends nothing more."""
    try:
        life.receive(Started)
    except (EOFError, OSError):
        pass
    main = threading.main_thread()
    main.join(1.0)  # it sees the same
    _leave(0)


def _leave(status: int) -> NoReturn:
    os._exit(status)


def main() -> None:
    """Serve as a rank."""
    give_way_early()
    first, *others = sys.argv[1:]
    num_ranks = int(others.pop())
    memory: int | None = None
    belts: list[int] = []
    if first == "--connect":
        host, port, rank = others
        channels = connect(place_of(host, port), int(rank))
    else:
        ends = (socket.socket(fileno=int(end)) for end in others[:NUM_SOCKETS])
        belts = [int(end) for end in others[NUM_SOCKETS:]]
        memory, channels = int(first), Channels(*(Channel(end, MAX_BYTES) for end in ends))
    try:
        start_pulse(channels.pulse)
        status = serve(memory, channels, num_ranks, belts)
    except (EOFError, OSError):  # rank 0 is gone
        status = 1
    logging.shutdown()
    _leave(status)


if __name__ == "__main__":
    main()
