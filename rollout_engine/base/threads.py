"""Starting of threads. If the system starts no more of them, only the call that needs one fails."""

import asyncio
import contextvars
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import ParamSpec, TypeVar

from rollout_engine.base.errors import RetryableError

P = ParamSpec("P")
R = TypeVar("R")

SWITCH_SECONDS = 0.0002
"""After this time a thread of an engine's own process gives way to one that waits for the interpreter.

A step asks for the interpreter again after each wait for a device or a C++ kernel; beside a thread that takes an update
it would wait Python's 5 ms each time. `tests/benchmarks/host.py --busy 1` measures it."""
_LOOK_SECONDS = 0.05
_IS_CANCELLED: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("is_cancelled", default=None)


def give_way_early() -> None:
    """Have all threads of this process give way after `SWITCH_SECONDS`; only for processes of the engine's own."""
    sys.setswitchinterval(SWITCH_SECONDS)


def start(thread: threading.Thread) -> threading.Thread:
    """Start a thread. Raises `RetryableError` if the system starts no more of them."""
    try:
        thread.start()
    except (RuntimeError, MemoryError) as problem:
        raise no_thread(thread.name, problem) from problem
    return thread


def start_thread(target: Callable[..., object], *args: object, name: str) -> threading.Thread:
    """Run `target(*args)` on a new daemon thread. Raises `RetryableError` if the system starts no more of them."""
    return start(threading.Thread(target=target, args=args, name=name, daemon=True))


async def run_in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Await a function that runs on a thread of its own, in this context. Raises `RetryableError`, nothing begun.

    A pool would keep a call for which it found no thread, and run it later. Once the awaiting task is cancelled, the
    next `raise_if_cancelled` of the function raises.
    """
    outcome, is_cancelled, context = Future[R](), threading.Event(), contextvars.copy_context()
    outcome.set_running_or_notify_cancel()
    context.run(_IS_CANCELLED.set, is_cancelled)
    work = partial(context.run, function, *args, **kwargs)
    start_thread(_carry_out, work, outcome, name=getattr(function, "__name__", "call"))
    try:
        return await asyncio.wrap_future(outcome)
    finally:
        is_cancelled.set()


def run_together(functions: Sequence[Callable[[], R]], *, name: str) -> list[Future[R]]:
    """Run functions at once, each on a thread of its own, and return their outcomes when all have ended.

    If this thread is interrupted or cancelled, or there is no thread for one of them (`RetryableError`), the next
    `raise_if_cancelled` of each function raises; that is raised here once all have ended.
    """
    is_cancelled, outcomes = threading.Event(), [Future[R]() for _ in functions]
    begun: list[Future[R]] = []
    try:
        for function, outcome in zip(functions, outcomes, strict=True):
            context = contextvars.copy_context()
            context.run(_IS_CANCELLED.set, is_cancelled)
            start_thread(_carry_out, partial(context.run, function), outcome, name=name)
            begun.append(outcome)
        while wait(begun, _LOOK_SECONDS).not_done:
            raise_if_cancelled()
    except BaseException:
        is_cancelled.set()
        wait(begun)
        raise
    return outcomes


def raise_if_cancelled() -> None:
    """Raise `asyncio.CancelledError` if no caller awaits this thread's work any more."""
    is_cancelled = _IS_CANCELLED.get()
    if is_cancelled is not None and is_cancelled.is_set():
        raise asyncio.CancelledError


def no_thread(name: str, problem: BaseException) -> RetryableError:
    """Make the error of a thread that cannot start."""
    what = f"The thread '{name}' cannot start ({type(problem).__name__}: {problem})"
    advice = "end threads or processes, or allow more (`ulimit -u`, the container's pids.max, memory), and call again"
    return RetryableError(f"{what}: {advice}.")


def _carry_out(work: Callable[[], R], outcome: "Future[R]") -> None:
    try:
        outcome.set_result(work())
    except BaseException as problem:
        outcome.set_exception(problem)
