"""The core in a process of its own: ``python -m rollout_engine.frontend.core_proc DESCRIPTOR``, nothing pickled.

    inbox ──> take ──> EngineCore.step ──> outputs, by client ──> CoreIO

`descriptor` is the child's end of the lifeline (`rollout_engine.frontend.lifeline`).
"""

import gc
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from functools import partial
from types import FrameType
from typing import Any

from rollout_engine.core.engine_core import EngineCore
from rollout_engine.errors import RolloutEngineError
from rollout_engine.execution.executor import InlineExecutor
from rollout_engine.frontend.background import run_in_background
from rollout_engine.frontend.client_split import check_sequences, sequences_of_client
from rollout_engine.frontend.core_io import ClientLeft, CoreIO, Do, FromClient, Hold, Stop
from rollout_engine.frontend.core_utilities import CoreUtilities
from rollout_engine.frontend.lifeline import CoreSettings, Lifeline, address_in, config_digest, lock_directory
from rollout_engine.frontend.outbound import Outbound
from rollout_engine.frontend.rpc_wire import answer
from rollout_engine.frontend.start_up import core_config, describe_choices
from rollout_engine.frontend.weight_ends import remove_directories
from rollout_engine.frontend.weight_intake import WeightIntake
from rollout_engine.frontend.wire import (
    PROTOCOL,
    Abort,
    AddRequest,
    Call,
    Ready,
    Refused,
    Reply,
    RpcCall,
    failure_of,
    pack,
)
from rollout_engine.messages import EngineCoreOutputs

logger = logging.getLogger("rollout_engine")


class EngineCoreProc:
    """Turns what clients send into calls on an `EngineCore`, and its outputs into messages to them."""

    def __init__(self, core: EngineCore, executor: InlineExecutor, io: CoreIO, directory: str) -> None:
        self._core, self._executor, self._io, self._directory = core, executor, io, directory
        executor.follow(core, lambda: Hold(io.inbox))
        self._outbound = Outbound(io.send)
        deliver = self._outbound.deliver
        self._weights = WeightIntake(core, executor, io.inbox, deliver)
        self._utilities = CoreUtilities(core, executor, io.stats, self._weights, deliver)
        self._stop_reason: str | None = None

    def run(self) -> str:
        """The busy loop: take what came in, step, deliver. Returns why it ended."""
        while self._stop_reason is None:
            self._take_all(wait=not self._core.can_progress())
            self._outbound.deliver(self._step())
            self._utilities.after_step()
        self._outbound.deliver(self._core.abort_sequences(self._core.unfinished_sequences))
        self._outbound.flush()
        return self._stop_reason

    def _step(self) -> EngineCoreOutputs:
        start = time.monotonic()
        outputs = self._core.step()
        outputs.start_time = start
        return outputs

    def _take_all(self, *, wait: bool) -> None:
        """Whatever has come in; with `wait` at least one message. What clients get for it comes after all that was."""
        inbox = self._io.inbox
        if wait or inbox.qsize():
            self._outbound.flush()
        if wait:
            self._take(inbox.get())
        for _ in range(inbox.qsize()):
            self._take(inbox.get())

    def _take(self, item: FromClient | ClientLeft | Hold | Do | Stop) -> None:
        match item:
            case FromClient(client_index, AddRequest() as message):
                self._add(client_index, message)
            case FromClient(client_index, Abort(sequences)):
                self._abort(sequences_of_client(client_index, sequences))
            case FromClient(client_index, Call() as call):
                self._call(client_index, call)
            case Hold():
                self._core.quiesce()
                item.reached.set()
                item.released.wait()
            case Do(action):
                action()
            case FromClient(client_index, RpcCall() as call):
                self._rpc(client_index, call)
            case ClientLeft(client_index):
                self._weights.leave(client_index)
                threading.Thread(target=self._executor.caller_left, args=(client_index,), daemon=True).start()
                remove_directories(self._directory, client_index)
                self._abort(sequences_of_client(client_index, self._core.unfinished_sequences))
                self._outbound.forget(client_index)
            case Stop(reason):
                self._stop_reason = reason

    def _add(self, client_index: int, message: AddRequest) -> None:
        try:
            message.request.params.check()
            check_sequences(client_index, message.request)
            self._core.add_request(message.request)
            self._outbound.watch(message.request)
        except Exception as error:
            self._io.send(client_index, Refused(message.request.first_sequence, _failure(error)))

    def _abort(self, sequences: list[int]) -> None:
        self._outbound.deliver(self._core.abort_sequences(sequences))

    def _call(self, client_index: int, call: Call) -> None:
        try:
            result = self._utilities.run(client_index, call)
        except Exception as error:
            self._io.send(client_index, Reply(call.number, failure=_failure(error)))
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda future: self._reply(client_index, call.number, future))
        else:
            self._io.send(client_index, Reply(call.number, pack(result)))

    def _rpc(self, client_index: int, call: RpcCall) -> None:
        def run() -> None:
            try:
                reply = answer(call, partial(self._executor.collective_rpc, caller=client_index))
            except Exception as error:
                reply = Reply(call.number, failure=_failure(error))
            self._io.send(client_index, reply)

        if self._executor.runs_beside_steps(call.method):
            run_in_background(run, name=f"rpc-{call.method}")
        else:
            run()

    def _reply(self, client_index: int, number: int, future: Future[Any]) -> None:
        error = future.exception()
        reply = Reply(number, pack(future.result())) if error is None else Reply(number, failure=_failure(error))
        self._io.send(client_index, reply)


def _failure(error: BaseException) -> Any:
    known = isinstance(error, RolloutEngineError)
    if not known:
        logger.error("a client's message failed", exc_info=error)
    return failure_of(error, "" if known else "".join(traceback.format_exception(error)))


def serve(lifeline: Lifeline) -> int:
    """Load the model, tell the parent, and serve clients until told to stop. Returns the exit status."""
    settings = lifeline.read(CoreSettings, timeout=60)
    assert isinstance(settings, CoreSettings), "by its type"
    logging.basicConfig(level=settings.log_level, format=f"core {os.getpid()}: %(message)s")
    lock_directory(settings.directory)
    sys.path[:] = settings.import_path  # our own packages are loaded: nothing of the user's takes their place
    try:
        settings.config.check()
        executor = InlineExecutor.from_config(settings.config)
        core = EngineCore(executor, core_config(settings.config, executor.info))
        io = CoreIO(
            address_in(settings.directory),
            lifeline.socket,
            heartbeat_seconds=settings.heartbeat_seconds,
            max_backlog_bytes=settings.max_backlog_bytes,
        )
    except Exception as error:
        lifeline.write(_failure(error))
        return 1
    gc.collect()
    gc.freeze()  # what start-up made stays; the collector need not walk it between steps
    proc = EngineCoreProc(core, executor, io, settings.directory)
    _stop_on_signals(io)
    io.start(lambda: _ready(settings, core, executor), on_orphaned=lambda: _vanish(settings.directory))
    lifeline.write(_ready(settings, core, executor))
    return _run(proc, io, settings.directory)


def _run(proc: EngineCoreProc, io: CoreIO, directory: str) -> int:
    status = 0
    try:
        reason = proc.run()
    except BaseException as error:
        logger.critical("the core failed and ends", exc_info=error)
        reason, status = f"it failed: {type(error).__name__}: {error}", 1
    io.close(reason)
    remove_directories(directory)
    shutil.rmtree(directory, ignore_errors=True)
    return status


def _stop_on_signals(io: CoreIO) -> None:
    """The first SIGTERM or SIGINT ends the process after the step in progress; more of them change nothing."""

    def stop(number: int, _: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        io.inbox.put(Stop(f"it received {signal.Signals(number).name}"))

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)


def _ready(settings: CoreSettings, core: EngineCore, executor: InlineExecutor) -> Ready:
    info = executor.info
    return Ready(
        protocol=PROTOCOL,
        pid=os.getpid(),
        config=settings.config,
        config_digest=config_digest(settings.config),
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        choices=describe_choices(settings.config, info),
        heartbeat_seconds=settings.heartbeat_seconds,
        policy_version=core.policy_version,
        dtype=info.dtype,
    )


def _vanish(directory: str) -> None:
    """The parent is dead and the busy loop stuck in a long step: there is nobody to wait for."""
    remove_directories(directory)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def main() -> None:
    """Run by `CoreProcess` alone; the argument is the descriptor of the lifeline."""
    status = serve(Lifeline(socket.socket(fileno=int(sys.argv[1]))))
    logging.shutdown()
    os._exit(status)  # at once: taking the interpreter down takes longer than parents may wait


if __name__ == "__main__":
    main()
