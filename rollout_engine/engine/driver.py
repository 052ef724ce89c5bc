"""The driver of one core: it runs every step and verb, one at a time, in the order of arrival.

    turn()            step, deliver its outputs, end the calls that waited for it
    run(call)         a verb, between two steps
    boundary()        anything else that must not meet a step: the commit of a weight update

The thread that holds the lock drives: in process one that calls the engine, in a core's own process its busy loop. A
thread that waits to change something runs before the next step.
"""

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.core.lifecycle import State
from rollout_engine.engine.calls import Call, WaitingCalls, copy_outcome
from rollout_engine.engine.engine_lock import EngineLock
from rollout_engine.engine.health import IoStats
from rollout_engine.engine.pieces import PiecewiseCalls, advance
from rollout_engine.engine.verb import Verb
from rollout_engine.execution.executor import InlineExecutor

_GIVE_WAY_SECONDS = 1.0
"""How long a step waits at most for a thread that wants to go first."""
_COMMIT_BYTES_PER_S = 64 << 20
"""Slower than any memory writes weights: a commit that is slower still does not end."""
_CALLER: ContextVar[int] = ContextVar("caller", default=0)


class Work(NamedTuple):
    """A step or verb that a thread computes: its name, when it began (`time.monotonic`), and the thread's id."""

    what: str
    start: float
    thread: int
    allowance: float = 0.0
    """Seconds that it may legitimately take in addition to `EngineConfig.step_deadline`."""


class EngineDriver:
    """One core, one executor, and the lock that all of their users take.

    Args:
        core: the scheduler and its state machine.
        executor: runs the model.
        deliver: takes the outputs of steps and verbs, always inside the lock.
        lock: held by every change of the engine.
        wake: notifies a busy loop that waits without the lock of a change.
    """

    def __init__(
        self,
        core: EngineCore,
        executor: InlineExecutor,
        deliver: Callable[[EngineCoreOutputs], None],
        *,
        lock: EngineLock | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.core, self.executor, self.deliver = core, executor, deliver
        self.lock = EngineLock() if lock is None else lock
        self._wake = wake
        self.io_stats = IoStats()
        self.forget_received_pictures: Callable[[], object] = lambda: None
        """Has clients in other processes and this one forget the pictures that crossed: there are none."""
        self._changed = threading.Condition(self.lock)  # type: ignore[arg-type]  # it is all that one asks of a lock
        self._entered = threading.Event()
        """Clear while a thread waits for the lock to change something."""
        self._entered.set()
        self.work: Work | None = None
        """The step, verb or commit of weights in progress."""
        self.stuck = ""
        """Why that cannot end, if a `StepWatchdog` has found so; else ""."""
        self.is_ending = False
        """New requests are refused, and the process ends with those in flight."""
        self._waiting, self._pieces = WaitingCalls(), PiecewiseCalls()
        executor.attach_core(core, self.boundary)

    @property
    def caller(self) -> int:
        """Index of the client whose verb runs on this thread."""
        return _CALLER.get()

    def can_progress(self) -> bool:
        """Whether `turn` would do anything now."""
        return self.core.can_progress() or bool(self._pieces)

    def turn(self) -> None:
        """Compute one step, deliver its outputs, run a piece of a call, and end the calls that waited for it.

        Raises `DirtyWeightsError` for requests that cannot continue before a complete weight update.
        """
        self.give_way()
        with self.lock:
            self.step()

    def give_way(self) -> None:
        """Let a thread that waits to change something run before the next step: a lock keeps no order of arrival."""
        self._entered.wait(_GIVE_WAY_SECONDS)

    def step(self) -> None:
        """Do as `turn` does, for a thread that has the lock."""
        start = time.monotonic()
        self.work = Work("a step", start, threading.get_ident())
        try:
            outputs = self.core.step()
        finally:
            self.work = None
        outputs.start_time = start
        self.deliver(outputs)
        if self._pieces:
            self._run_piece(self._pieces.pop())
        if self._waiting:
            self._end_calls()

    def require_step(self) -> None:
        """Raise `DirtyWeightsError` if requests cannot continue before a complete weight update."""
        if self.core.lifecycle.state is State.DIRTY and self.core.num_unfinished_requests:
            self.core.lifecycle.require_clean("step")

    def wait_for_change(self, is_over: Callable[[], bool], timeout: float | None = None) -> None:
        """Return once `is_over()`, which is checked after every change, or after `timeout` seconds."""
        if not is_over():
            with self._changed:
                self._changed.wait_for(is_over, timeout)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises as `EngineCore.add_request`."""
        with self.between_steps():
            self.core.add_request(request)

    def abort(self, sequence_ids: Collection[int]) -> None:
        """End sequences; unknown ones are a no-op."""
        with self.between_steps():
            self.deliver(self.core.abort_sequences(sequence_ids))

    def run(self, call: Call) -> None:
        """Carry a call out on this thread; its future gets the result now, or after the step that completes it."""
        verb, token = call.verb, _CALLER.set(call.caller)
        try:
            if verb.when != "between steps" or self.runs_beside_steps(call):
                self._carry_out(call)
            else:
                with self.between_steps():
                    self.work = Work(verb.title(call.arguments), time.monotonic(), threading.get_ident())
                    try:
                        self._carry_out(call)
                    finally:
                        self.work = None
        except BaseException as error:
            if not call.future.done():
                call.future.fail(error)
            elif not isinstance(error, Exception):  # an interrupt that arrived after the result
                raise
        finally:
            _CALLER.reset(token)

    def runs_beside_steps(self, call: Call) -> bool:
        """Whether a call is long work for a thread of its own, concurrently with steps."""
        return call.verb.beside_steps is not None and call.verb.beside_steps(self, call.arguments)

    @contextmanager
    def between_steps(self, deadline: float = math.inf) -> Iterator[None]:
        """Hold the lock for a change; afterwards the threads that wait for one check again.

        Raises `TimeoutError`, naming the work in progress, if it still holds the lock at `deadline` (`time.monotonic`).
        """
        self._entered.clear()
        seconds = deadline - time.monotonic()
        try:
            is_taken = self.lock.acquire(-1 if math.isinf(seconds) else min(max(seconds, 0.0), threading.TIMEOUT_MAX))
        finally:
            self._entered.set()
        if not is_taken:
            work = self.work
            raise TimeoutError("the engine is busy" if work is None else f"the engine is busy with {work.what}")
        try:
            yield
            if self._waiting:
                self._end_calls()
        finally:
            self._changed.notify_all()
            self._changed.release()
            self._wake()

    @contextmanager
    def boundary(self, deadline: float = math.inf) -> Iterator[None]:
        """Hold the lock with no step in flight and no call half done: begun work ends under the present weights.

        Raises `TimeoutError` if that is not so at `deadline` (`time.monotonic`); `LifecycleError` after shutdown.
        """
        with self.between_steps(deadline):
            while self._pieces:
                if time.monotonic() >= deadline:
                    raise TimeoutError("calls that the engine had begun have not ended")
                self.step()
            with self._working("the step that a weight update waits for"):
                self.core.quiesce()
            with self._working("the commit of a weight update", self.executor.num_weight_bytes / _COMMIT_BYTES_PER_S):
                yield

    @contextmanager
    def _working(self, what: str, allowance: float = 0.0) -> Iterator[None]:
        """Record this thread's work, for a watchdog."""
        around, self.work = self.work, Work(what, time.monotonic(), threading.get_ident(), allowance)
        try:
            yield
        finally:
            self.work = around

    def is_drained(self) -> bool:
        """Whether nothing drains any more: a pause or sleep is complete."""
        return not self.core.lifecycle.draining

    def is_idle(self) -> bool:
        """Whether no request is in flight, nor a pause or sleep that waits for the last outputs to be returned.

        Raises `LifecycleError` when requests are frozen and cannot finish.
        """
        return not self.core.num_draining("wait_for_requests_to_drain") and self.is_drained()

    def shutdown(self) -> None:
        """Refuse every verb from now on; calls that wait end with an error."""
        with self.between_steps():
            self.core.shutdown()
            while self._pieces:
                self._run_piece(self._pieces.pop())

    def _carry_out(self, call: Call) -> None:
        if not call.verb.after_shutdown:
            self.core.lifecycle.require_alive(call.verb.name)
        if not call.future.begin():
            return
        if call.is_late and call.verb.until is None:
            raise call.verb.too_late(call.arguments, begun=False)
        call.result = call.verb.function(self, **call.arguments)
        if isinstance(call.result, Future):
            call.result.add_done_callback(lambda done: copy_outcome(done, call.future))
        elif call.verb.in_pieces:
            self.begin_pieces(call)
        else:
            self._end_or_wait(call)

    def begin_pieces(self, call: Call) -> None:
        """Begin a call whose verb runs in pieces."""
        self._run_piece(call)

    def _run_piece(self, call: Call) -> None:
        """Run the next piece of a call, and end the call with its last one."""
        token, around = _CALLER.set(call.caller), self.work
        self.work = around or Work(call.verb.title(call.arguments), time.monotonic(), threading.get_ident())
        try:
            if advance(call, lambda: self.core.lifecycle.require_alive(call.verb.name)):
                self._end_or_wait(call)
            else:
                self._pieces.add(call)
        except BaseException as error:
            call.future.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self.work = around
            _CALLER.reset(token)

    def _end_or_wait(self, call: Call) -> None:
        """End a call that is complete, has failed, or is too late; else keep it for a later step."""
        verb = call.verb
        try:
            if verb.until is not None:
                self.core.lifecycle.require_alive(verb.name)
                if not verb.until(self):
                    if not call.is_late:
                        return self._waiting.add(call)
                    raise verb.too_late(call.arguments, begun=True)
        except Exception as error:
            return call.future.fail(error)
        if verb.observe is not None:
            verb.observe(self.core.stats, time.perf_counter() - call.start)
        call.future.succeed(call.result)

    def _end_calls(self) -> None:
        for call in self._waiting.pop(self._is_over):
            self._end_or_wait(call)

    def _is_over(self, verb: Verb) -> bool:
        """Whether calls of a verb wait no longer: they are complete, or have failed."""
        assert verb.until is not None, "only such calls wait"
        try:
            self.core.lifecycle.require_alive(verb.name)
            return verb.until(self)
        except Exception:
            return True
