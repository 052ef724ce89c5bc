"""A rank's process: ``python -m rollout_engine.execution.rank_main MEMORY LIFE STEPS CALLS NUM_RANKS``.

The first four are descriptors: of the memory that all ranks share, and of this rank's ends of the sockets of
`rank_wire`. Only `RankTeam` starts one. It ends when rank 0 does, and takes part in no more when any rank has ended.
"""

import logging
import os
import socket
import sys
import threading
from typing import NoReturn

from rollout_engine.execution.rank_wire import (
    CallMessage,
    Channel,
    Done,
    Failed,
    RankSettings,
    Started,
    StepMessage,
    pack_value,
)
from rollout_engine.execution.rank_worker import RankWorker
from rollout_engine.kernels.cpu.turns import BrokenTurnsError
from rollout_engine.model.backends import device_of, exchange_of
from rollout_engine.model.ranks.seat import Seat
from rollout_engine.threads import give_way_early, start_thread

logger = logging.getLogger("rollout_engine")


def serve(memory: int, life: Channel, steps: Channel, calls: Channel, num_ranks: int) -> int:
    """Load this rank's part and take part until rank 0 ends. Returns the exit status."""
    settings = life.receive(RankSettings)
    logging.basicConfig(level=settings.log_level, format=f"rank {settings.rank}: %(message)s")
    start_thread(_end_with, life, name="rank-0")
    sys.path[:] = settings.import_path
    try:
        device = device_of(settings.config)
        seat = Seat(exchange_of(device, memory, settings.rank, num_ranks, settings.rendezvous))
    except BaseException as error:
        life.send(Failed.of(error))
        return 1
    os.close(memory)
    try:
        worker = RankWorker(settings, seat)
        life.send(Started())
    except BaseException as error:
        seat.exchange.break_()
        if not isinstance(error, BrokenTurnsError):
            life.send(Failed.of(error))
        return 1
    start_thread(_take_part, worker, seat, life, steps, name="steps")
    try:
        while True:
            _answer(worker, calls)
    except (EOFError, OSError):
        worker.close()
    return 0


def _answer(worker: RankWorker, calls: Channel) -> None:
    message = calls.receive(CallMessage)
    try:
        answer: Done | Failed = Done(pack_value(worker.carry_out(message)))
    except Exception as error:
        answer = Failed.of(error)
    calls.send(answer)


def _take_part(worker: RankWorker, seat: Seat, life: Channel, steps: Channel) -> None:
    try:
        while True:
            worker.take_part(steps.receive(StepMessage))
    except (EOFError, OSError):
        return
    except BrokenTurnsError:
        _leave(1)
    except BaseException as error:
        logger.critical("a step failed", exc_info=error)
        seat.exchange.break_()
        life.send(Failed.of(error))
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
    memory, *ends, num_ranks = map(int, sys.argv[1:])
    life, steps, calls = (Channel(socket.socket(fileno=end)) for end in ends)
    try:
        status = serve(memory, life, steps, calls, num_ranks)
    except (EOFError, OSError):  # rank 0 is gone
        status = 1
    logging.shutdown()
    _leave(status)


if __name__ == "__main__":
    main()
