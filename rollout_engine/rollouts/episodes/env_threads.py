"""Runs calls on threads of this process, made as they are needed, and on an event loop if they await.

A call whose deadline passes loses its thread: another takes the place, and it ends when the call returns after all.
"""

import inspect
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from rollout_engine.base.errors import RetryableError
from rollout_engine.base.threads import start_thread
from rollout_engine.rollouts.episodes.env_call import Call
from rollout_engine.rollouts.episodes.env_host import EnvFailure, failure_of
from rollout_engine.rollouts.episodes.env_loop import EventLoopThread


class ThreadCalls:
    """At most `num_threads` threads, and one event loop.

    `began(call)` is called when a call begins, on its thread; `returned(call, result)` when it has returned, written
    off or not; an exception is an `EnvFailure` as its result. Both must be quick.
    """

    def __init__(
        self, num_threads: int, began: Callable[[Call], object], returned: Callable[[Call, Any], object]
    ) -> None:
        self._num_threads, self._began, self._returned = num_threads, began, returned
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        """The threads that take calls; neither ended nor written off."""
        self._load = 0
        """Calls that wait for a thread or are on one of these."""
        self._loops: list[EventLoopThread] = []
        """Event loops: the last one takes calls; earlier ones are or were blocked by a call."""
        self._is_closed = False

    def submit(self, call: Call) -> None:
        """Run a call on a thread, or at once on the event loop if its environment is async; returns at once."""
        if call.is_async:
            self._submit_async(call)
            return
        if self._is_closed:  # by a thread that had been given up: it may as well do this
            self._carry_out(call)
            return
        with self._lock:
            self._load += 1
            self._queue.put(call)
            problem = self._start_one()
        if problem is not None:
            self._fail_waiting(problem)

    def write_off(self, call: Call, message: str) -> None:
        """Interrupt a call and give its thread up; one on the event loop is cancelled."""
        problem = None
        with self._lock:
            if call.is_on_thread:
                call.is_written_off = True
                self._load -= 1
                self._threads = {each for each in self._threads if each.ident != call.code.thread}
                problem = self._start_one()
        if problem is not None:
            self._fail_waiting(problem)
        self.cancel(call)
        with self._lock:
            if self._loops and self._loops[-1].is_blocked_by(call):
                self._loops += self._new_loop()
        call.code.interrupt(message)

    def cancel(self, call: Call) -> None:
        """Cancel a call that is on the event loop."""
        if call.stop is not None:
            with suppress(RuntimeError):  # the loop has ended
                call.stop()

    def close(self, seconds: float) -> list[str]:
        """End the threads and the loop once they are idle. Returns the names of those still busy after `seconds`."""
        with self._lock:
            self._is_closed = True
            threads = list(self._threads)
            for _ in threads:
                self._queue.put(None)
            for loop in self._loops:
                loop.close()
            threads += [loop.thread for loop in self._loops]
        deadline = time.monotonic() + seconds
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in threads if thread.is_alive()]

    def _start_one(self) -> RetryableError | None:
        """Start a thread if more calls wait than threads are free. Returns the error if there is no thread at all."""
        if self._load <= len(self._threads) or len(self._threads) >= self._num_threads:
            return None
        try:
            self._threads.add(start_thread(self._work, name="environments"))
        except RetryableError as problem:
            return None if self._threads else problem
        return None

    def _fail_waiting(self, problem: RetryableError) -> None:
        while not self._queue.empty():
            call = self._queue.get()
            if call is not None:
                with self._lock:
                    self._load -= 1
                self._began(call)
                self._returned(call, EnvFailure(f"{call.what}: {problem}", problem))

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            if self._carry_out(call):
                return

    def _carry_out(self, call: Call) -> bool:
        """Make a call here. Returns whether this thread was written off meanwhile."""
        call.is_on_thread = True
        call.code.thread = threading.get_ident()
        self._began(call)
        result: Any = None
        try:
            if not call.is_dropped:
                with call.code:
                    result = call.work()
        except BaseException as problem:  # also an exit: it ends an episode, not the threads of others
            result = failure_of(call.what, problem)
        with self._lock:
            call.is_on_thread = False
            if not call.is_written_off:
                self._load -= 1
        if inspect.isawaitable(result) and not call.is_written_off:
            self._submit_async(call, result)
        else:
            _discard(result)
            self._returned(call, result)
        return call.is_written_off

    def _submit_async(self, call: Call, awaitable: Any = None) -> None:
        if awaitable is None:
            self._began(call)
        try:
            with self._lock:
                self._loops = self._loops or [EventLoopThread(self._returned)]
                self._loops[-1].submit(call, awaitable)
        except (RetryableError, RuntimeError) as problem:  # no thread, or all has ended
            _discard(awaitable)
            self._returned(call, EnvFailure(f"{call.what}: {problem}", problem))

    def _new_loop(self) -> list[EventLoopThread]:
        try:
            return [EventLoopThread(self._returned)]
        except RetryableError:  # the calls wait for the old one
            return []


def _discard(result: Any) -> None:
    if inspect.iscoroutine(result):
        result.close()
