"""Starting of threads. Where the system starts no more of them, the call that needs one fails, and nothing else."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import ParamSpec, TypeVar

from rollout_engine.errors import RetryableError

P = ParamSpec("P")
R = TypeVar("R")


def start(thread: threading.Thread) -> threading.Thread:
    """Start a thread. Raises `RetryableError` where the system starts no more of them."""
    try:
        thread.start()
    except (RuntimeError, MemoryError) as problem:
        raise no_thread(thread.name, problem) from problem
    return thread


def start_thread(target: Callable[..., object], *args: object, name: str) -> threading.Thread:
    """Run `target(*args)` on a new daemon thread. Raises `RetryableError` where the system starts no more of them."""
    return start(threading.Thread(target=target, args=args, name=name, daemon=True))


async def run_in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Await a function that runs on a thread of its own, in this context. Raises `RetryableError`, nothing begun.

    A pool would keep what it found no thread for, and run it later.
    """
    outcome: Future[R] = Future()
    outcome.set_running_or_notify_cancel()
    work = partial(contextvars.copy_context().run, function, *args, **kwargs)
    start_thread(_carry_out, work, outcome, name=getattr(function, "__name__", "call"))
    return await asyncio.wrap_future(outcome)


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
