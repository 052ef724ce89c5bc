"""The core's process: ``python -m rollout_engine.process.core_main LIFELINE LOCKED DIRECTORY``.

LIFELINE and LOCKED are descriptors, of the child's end of the lifeline and of the locked file in the engine's DIRECTORY
(`rollout_engine.process.lifeline`). When the parent is killed, the system kills this process, and the parent's guard
removes the directory.
"""

import gc
import logging
import os
import shutil
import socket
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import NoReturn

from rollout_engine.base.errors import RetryableError
from rollout_engine.base.threads import give_way_early
from rollout_engine.children.channel import Channel
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.engine.history import History
from rollout_engine.engine.start_up import engine_info, make_core
from rollout_engine.engine.step_watchdog import StepWatchdog
from rollout_engine.execution.executor import InlineExecutor
from rollout_engine.execution.process_executor import make_executor
from rollout_engine.process import descriptors
from rollout_engine.process.core_launcher import config_digest
from rollout_engine.process.core_proc import EngineCoreProc, sendable_failure
from rollout_engine.process.core_socket import CoreSocket
from rollout_engine.process.end_signals import end_on_signals
from rollout_engine.process.lifeline import MAX_LIFELINE_BYTES, CoreSettings
from rollout_engine.process.post_mortem import catch_crashes, write_post_mortem
from rollout_engine.process.pulse import Pulse
from rollout_engine.process.weight_rendezvous import remove_directories
from rollout_engine.process.wire import PROTOCOL, Ready

logger = logging.getLogger("rollout_engine")

_ATTEMPTS = 100
"""Times that the engine's directory is removed until it is gone."""


def serve(lifeline: Channel, directory: str) -> int:
    """Load the model, notify the parent, and serve clients until a signal to stop. Returns the exit status.

    Raises `EOFError` or `OSError` if the parent is gone by then.
    """
    settings: CoreSettings = lifeline.receive(CoreSettings, timeout=60)
    logging.basicConfig(level=settings.log_level, format=f"core {os.getpid()}: %(message)s")
    catch_crashes(directory)
    pulse = Pulse(directory, lifeline.socket)
    descriptors.raise_limit()
    sys.path[:] = settings.import_path  # our own packages are loaded: modules of the user cannot replace them
    try:
        settings.config.check()
        executor = make_executor(settings.config, settings.group)
        core = make_core(settings.config, executor)
        history = History(core)
        connections = descriptors.connections_possible(2 if settings.listen else 1)
        io = CoreSocket(
            directory,
            lifeline.socket,
            heartbeat_seconds=settings.heartbeat_seconds,
            max_backlog_bytes=settings.max_backlog_bytes,
            connections=connections,
            listen=settings.listen,
            keys=settings.keys,
        )
    except Exception as error:
        lifeline.send(sendable_failure(error))
        return 1
    gc.collect()
    gc.freeze()  # objects made at start-up stay; the collector need not walk them between steps
    proc = EngineCoreProc(core, executor, io, directory)
    end_on_signals(io.inbox)
    io.on_turn, proc.on_step, proc.on_verb = pulse.turn, pulse.step, history.record_verb
    descriptors.write_places(directory, connections.num_clients)
    try:
        if settings.config.step_deadline is not None:
            StepWatchdog(proc.driver, settings.config.step_deadline, partial(_give_up, history, io, directory))
        io.start(lambda: _ready(settings, core, executor, io), on_orphaned=lambda: _leave(directory, 1))
        executor.watch(partial(_give_up, history, io, directory))
    except RetryableError as error:
        lifeline.send(sendable_failure(error))
        return 1
    lifeline.send(_ready(settings, core, executor, io))
    return _run(proc, executor, history, io)


def _run(proc: EngineCoreProc, executor: InlineExecutor, history: History, io: CoreSocket) -> int:
    status, trace = 0, ""
    try:
        reason = proc.run()
        executor.leave_group()
    except BaseException as error:
        logger.critical("the core failed and ends", exc_info=error)
        reason, status = f"it failed: {type(error).__name__}: {error}", 1
        trace = "".join(traceback.format_exception(error))
    file = None if io.is_orphaned else write_post_mortem(history, reason, trace)
    io.close(reason + _see(file))
    return status


def _see(file: Path | None) -> str:
    return "" if file is None else f" (see `rollout-engine postmortem {file}`)"


def _ready(settings: CoreSettings, core: EngineCore, executor: InlineExecutor, io: CoreSocket) -> Ready:
    return Ready(
        protocol=PROTOCOL,
        pid=os.getpid(),
        config_digest=config_digest(settings.config),
        heartbeat_seconds=settings.heartbeat_seconds,
        policy_version=core.policy_version,
        info=engine_info(settings.config, executor.info),
        address=io.address,
    )


def _give_up(history: History, io: CoreSocket, directory: str, reason: str) -> NoReturn:
    """Notify every client why this process ends, and end it: the busy loop cannot."""
    try:
        io.close(reason + _see(write_post_mortem(history, reason)))
    finally:  # also if the process is ending for another reason at the same time
        _leave(directory, 1)


def _leave(directory: str, status: int) -> NoReturn:
    """End this process at once, and leave no file of the engine's behind."""
    remove_directories(directory)
    for _ in range(_ATTEMPTS):  # another thread may make a file between two looks, which keeps the directory
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.exists(directory):
            break
        time.sleep(0.01)
    os._exit(status)  # finalizing the interpreter takes longer than the parent waits


def main() -> None:
    """Serve as a core's process; only `CoreProcess` starts one."""
    descriptor, locked, directory = sys.argv[1:]
    give_way_early()
    os.set_inheritable(int(locked), False)  # it stays open, and locked, as long as this process lives
    lifeline = Channel(socket.socket(fileno=int(descriptor)), MAX_LIFELINE_BYTES)
    try:
        status = serve(lifeline, directory)
    except (EOFError, OSError):  # the parent is gone
        status = 1
    except BaseException:
        logger.critical("the core failed and ends", exc_info=True)
        status = 1
    logging.shutdown()
    _leave(directory, status)


if __name__ == "__main__":
    main()
