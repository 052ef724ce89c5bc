"""The busy loop of a core's process.

    CoreSocket.inbox ──> EngineCoreProc ──> EngineCore.step ──> OutputBatcher ──> CoreSocket.send

`rollout_engine.process.core_main` starts it. Nothing is pickled.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from rollout_engine.base.errors import RequestError, RetryableError, RolloutEngineError, RPCError, unknown_name
from rollout_engine.base.messages import EngineCoreOutputs
from rollout_engine.children.failure import Failure, WireError, failure_of
from rollout_engine.children.values import LONG_BYTES, Packed, pack, unpack
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.engine.calls import Call, CallFuture
from rollout_engine.engine.engine_lock import EngineLock
from rollout_engine.engine.verbs import VERBS
from rollout_engine.execution.executor import InlineExecutor
from rollout_engine.execution.group_executor import GroupExecutor
from rollout_engine.process import wire
from rollout_engine.process.background import run_in_background
from rollout_engine.process.client_routing import check_sequences, sequences_of_client
from rollout_engine.process.core_socket import CoreSocket
from rollout_engine.process.group_driver import GroupDriver
from rollout_engine.process.inbox import ClientLeft, Drain, FromClient, Stop, Wake
from rollout_engine.process.output_batcher import OutputBatcher
from rollout_engine.process.quotas import Quotas
from rollout_engine.process.request_columns import request_of
from rollout_engine.process.weight_rendezvous import remove_directories
from rollout_engine.process.weight_server import WEIGHT_VERBS, ServingDriver
from rollout_engine.process.wire import Abort, AddRequest, Cancel, ForgetPictures, LiveVersion, Refused, Reply

logger = logging.getLogger("rollout_engine")

_LEAST_SECONDS = 0.002
"""How long messages are taken before the next step, if the last one was shorter."""
DRAIN_SECONDS = 25.0
"""How long requests in flight may take to end after SIGTERM: less than the 30 s of Kubernetes before it kills."""


class EngineCoreProc:
    """Runs the steps of one driver, and the requests and calls that clients send."""

    def __init__(
        self,
        core: EngineCore,
        executor: InlineExecutor,
        io: CoreSocket,
        directory: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._core, self._executor, self._io, self._directory = core, executor, io, directory
        self._batcher, self._quotas = OutputBatcher(io.send), Quotas()
        lock = EngineLock(holds_signals=False)  # a signal ends this process after the step in progress anyway
        is_divided = isinstance(executor, GroupExecutor) and executor.group is not None
        kind = GroupDriver if is_divided else ServingDriver
        self.driver = kind(core, executor, self._deliver, lock=lock, wake=self._wake)
        self.driver.io_stats, core.stats.pictures = io.stats, io.picture_stats
        self.driver.forget_received_pictures = lambda: io.send_all(ForgetPictures())
        self._thread = threading.get_ident()
        self._told_version, self._telling = core.policy_version, threading.Lock()
        """The live version that clients were last notified of."""
        self._stop_reason: str | None = None
        self.on_step: Callable[[], None] = lambda: None
        """Called after every step."""
        self.on_verb: Callable[[str], None] = lambda title: None
        """Called with the title of each call that is to run between two steps."""
        self._calls: dict[tuple[int, int], CallFuture] = {}
        """Calls that have not been answered, by client and number."""
        self._step_seconds = 0.0
        """Duration of the last turn of the driver."""
        self._drain: tuple[str, float] | None = None
        """Why the process ends once nothing is in flight, and when it does so at the latest."""
        io.answer, io.on_cancel = self._answer_at_once, self._cancel_begun

    def run(self) -> str:
        """Run the busy loop: take messages, compute a step, deliver its outputs. Returns why it ended."""
        while self._stop_reason is None:
            self._take_messages(wait=not self.driver.can_progress())
            start = self._clock()
            self.driver.turn()
            self._step_seconds = self._clock() - start
            self.on_step()
            self._end_draining()
        with self.driver.lock:
            outputs = self._core.abort_sequences(self._core.unfinished_sequences)
            for end in outputs.ended:
                end.is_given_up = True
            self._deliver(outputs)
            self._batcher.flush()
        return self._stop_reason

    def _end_draining(self) -> None:
        if self._drain is not None and self._stop_reason is None:
            reason, deadline = self._drain
            in_flight = self._core.num_unfinished_requests
            if self._clock() >= deadline and in_flight:
                self._stop_reason = f"{reason}; {in_flight} requests were still in flight after {DRAIN_SECONDS:g} s"
            elif not (in_flight or self.driver.can_progress()):
                self._stop_reason = reason

    def _wake(self) -> None:
        """Wake the busy loop, and notify every client if the live version has changed."""
        with self._telling:
            version = self._core.policy_version
            if version != self._told_version:
                self._told_version = version
                self._io.send_all(LiveVersion(version))
        if threading.get_ident() != self._thread:
            self._io.inbox.put_first(Wake())

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        self._quotas.end_samples(outputs.ended)
        self._batcher.deliver(outputs)

    def _take_messages(self, *, wait: bool) -> None:
        """Take messages for as long as a step takes; with `wait`, at least one. Held outputs are sent first."""
        inbox = self._io.inbox
        if wait or inbox.qsize():
            with self.driver.lock:
                self._batcher.flush()
        if wait:
            with contextlib.suppress(queue.Empty):
                self._take(inbox.get(self._patience()))
        end = self._clock() + max(self._step_seconds, _LEAST_SECONDS)
        for _ in range(inbox.qsize()):
            self._take(inbox.get())
            if self._clock() >= end:
                break

    def _patience(self) -> float | None:
        """Seconds to wait for a message if there is nothing to compute; None: indefinitely."""
        return None if self._drain is None else max(self._drain[1] - self._clock(), 0.0)

    def _take(self, item: FromClient | ClientLeft | Wake | Drain | Stop) -> None:
        match item:
            case FromClient(client_index) if client_index in self._io.gone:
                pass
            case FromClient(client_index, AddRequest() as message):
                self._add(client_index, message)
            case FromClient(client_index, Abort(sequence_ids)):
                self.driver.abort(sequences_of_client(client_index, sequence_ids))
            case FromClient(client_index, wire.Call() as message):
                self._call(client_index, message)
            case FromClient(client_index, Cancel(number)):
                self._io.cancelled.discard((client_index, number))
                self._cancel_begun(client_index, number)
            case ClientLeft(client_index):
                self._forget(client_index)
            case Drain(reason):
                self._drain = reason, self._clock() + DRAIN_SECONDS
                self.driver.is_ending = True
                self._io.drain(reason)
            case Stop(reason, is_failure=True):
                raise RuntimeError(reason)
            case Stop(reason):
                self._stop_reason = reason

    def _add(self, client_index: int, message: AddRequest) -> None:
        n = message.request.params.n
        try:
            if self._drain is not None:
                what = f"The engine's core is about to end ({self._drain[0]}) and takes no more requests"
                raise RetryableError(f"{what}: send this one to another engine.")
            request = request_of(message)
            request.params.check()
            check_sequences(client_index, request)
            self._quotas.add_samples(client_index, n)
            try:
                with self.driver.lock:
                    self.driver.add_request(request)
                    self._batcher.watch(request)
            except BaseException:
                self._quotas.refuse_samples(client_index, n)
                raise
        except Exception as error:
            self._io.send(client_index, Refused(message.request.first_sequence_id, sendable_failure(error)))

    def _call(self, client_index: int, message: wire.Call) -> None:
        key = client_index, message.number
        if key in self._io.cancelled:
            return
        try:
            call = _driver_call(client_index, message)
            if call.verb.when == "between steps":
                self.on_verb(call.verb.title(call.arguments))
            beside = self.driver.runs_beside_steps(call)
            self._quotas.add_call(client_index)
        except Exception as error:
            self._io.send(client_index, Reply(message.number, failure=sendable_failure(error)))
            return
        self._calls[key] = call.future
        call.future.add_done_callback(lambda done: self._answer(key, call, done))
        if beside:
            try:
                run_in_background(self.driver.run, call, name=message.name)
            except RetryableError as error:
                call.future.fail(error)
        else:
            self.driver.run(call)

    def _answer_at_once(self, client_index: int, message: wire.Call) -> bool:
        """Answer a call on the socket's thread, whatever this one computes. False: its verb is not of that kind."""
        verb = VERBS.get(message.name)
        if verb is None or verb.when != "at once":
            return False
        self._call(client_index, message)
        return True

    def _answer(self, key: tuple[int, int], call: Call, done: Future[Any]) -> None:
        client_index, number = key
        self._calls.pop(key, None)
        self._quotas.end_call(client_index)
        if not done.cancelled():
            self._io.send(client_index, _reply(number, call, done))

    def _cancel_begun(self, client_index: int, number: int | None) -> None:
        """Cancel a call that has begun, or all of a client. Any thread may: a commit may keep the busy loop waiting."""
        keys = (
            [key for key in list(self._calls) if key[0] == client_index] if number is None else [(client_index, number)]
        )
        for key in keys:
            future = self._calls.get(key)
            if future is not None:
                future.cancel()

    def _forget(self, client_index: int) -> None:
        """End the requests, calls and updates of a client that has left."""
        self._io.gone.discard(client_index)
        self._io.cancelled.difference_update([key for key in list(self._io.cancelled) if key[0] == client_index])
        self._cancel_begun(client_index, None)
        self.driver.weights.leave(client_index)
        self.driver.adapters.leave(client_index)
        try:
            run_in_background(self._executor.caller_left, client_index, name="client-left")
        except RetryableError as problem:  # an update that the client has begun ends at its deadline
            logger.warning("client %d has left: %s", client_index, problem)
        remove_directories(self._directory, client_index)
        self.driver.abort(sequences_of_client(client_index, self._core.unfinished_sequences))
        with self.driver.lock:
            self._batcher.forget(client_index)
        self._quotas.forget(client_index)


def _driver_call(client_index: int, message: wire.Call) -> Call:
    """Make the call that a message asks for. Raises `RequestError` for an unknown verb or wrong arguments."""
    verb = VERBS.get(message.name) or WEIGHT_VERBS.get(message.name)
    if verb is None or not verb.crosses:
        known = [name for name, each in VERBS.items() if each.crosses]
        raise RequestError(unknown_name("verb", message.name[:80], known), field="name", value=message.name)
    try:
        arguments = unpack(message.arguments, message.arrays, dict[str, Any])
    except WireError as problem:
        raise RequestError(f"{verb.name}: {problem}.", field="arguments") from None
    return Call(verb, arguments, caller=client_index, deadline=message.deadline)


def _reply(number: int, call: Call, done: Future[Any]) -> Reply:
    error = done.exception()
    if error is None:
        try:
            return _reply_of(number, pack(done.result()))
        except (TypeError, ValueError, OverflowError) as problem:
            title = call.verb.title(call.arguments)
            error = RPCError(f"{title} ran, but its result cannot travel: {problem}.", method=title)
    return Reply(number, failure=sendable_failure(error))


def _reply_of(number: int, result: Packed) -> Reply:
    if len(result.body) <= LONG_BYTES:
        return Reply(number, result.body, arrays=result.arrays)
    return Reply(number, arrays=result.arrays, long_result=np.frombuffer(result.body, np.uint8))


def sendable_failure(error: BaseException) -> Failure:
    """Encode an error of a client's message; one that is none of ours is logged, and takes its traceback along."""
    if not isinstance(error, RolloutEngineError):
        logger.error("a client's message failed", exc_info=error)
    return failure_of(error)
