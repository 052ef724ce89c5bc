"""A process that computes for a front end and may be killed: for work that a stranger's text can make endless.

ask ── a message ──> `answer_orders` in the process: answers it in bounded time and memory
    <── an answer, or the process ends: the work is refused, and the next one gets another process
"""

import resource
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import psutil

from rollout_engine.base.errors import LifecycleError, RetryableError
from rollout_engine.children.channel import Channel
from rollout_engine.children.child import Child
from rollout_engine.children.process import start_module

NO_ANSWER = (OSError, EOFError, msgspec.DecodeError)
"""Errors of `Child.ask` if the process has ended, is too late, or sends bytes that are no answer."""
_IDLE_SECONDS = 60.0
"""After this time without an order the process ends itself."""
_END_SECONDS = 1.0


class OneProcess:
    """Keeps at most one process, which starts when it is first asked for and is replaced when it has failed.

    It ends with this object. Not for several threads at once, but for `close`.

    Args:
        module: the one that it runs, of this package. It calls `answer_orders`.
        work: its task, for errors: "compiles grammars".
        field: the users' input to it, for the error of a call that `close` has interrupted.
    """

    def __init__(self, module: str, work: str, field: str) -> None:
        self._module, self._work, self._field = module, work, field
        self._processes: list[Child] = []
        self.close = weakref.finalize(self, _end_all, self._processes)
        """End the process."""

    def get(self) -> tuple[Child, bool]:
        """The process, and whether it has just been started.

        Raises `LifecycleError` after `close`, and `RetryableError` if the system starts no process.
        """
        for process in self._processes:
            return process, False
        process = self._start()
        self._processes.append(process)
        if not self.close.alive:
            self.end(process)
            raise self._make_closed_error()
        return process, True

    def end(self, process: Child) -> int:
        """End the process, which has not answered; its status, 0 in a forked process, which it does not belong to.

        Raises `LifecycleError` if `close` has ended it.
        """
        try:
            self._processes.remove(process)
        except ValueError:
            raise self._make_closed_error() from None
        return process.end() or 0

    def _start(self) -> Child:
        def start(descriptors: Sequence[int]) -> "subprocess.Popen[bytes]":
            # libraries report on standard error that memory has run out
            return start_module(self._module, descriptors=descriptors, stderr=subprocess.DEVNULL)

        try:
            return Child(start, end_seconds=_END_SECONDS)
        except OSError as problem:
            what = f"A process that {self._work} cannot start ({problem})"
            raise RetryableError(f"{what}: end processes, or allow more, and send the request again.") from problem

    def _make_closed_error(self) -> LifecycleError:
        return LifecycleError(f"{self._field}: the engine was shut down while it was tried; make a new one.")


def _end_all(processes: list[Child]) -> None:
    while processes:
        processes.pop().end()


def answer_orders(kinds: Any, answer: Callable[[Any], msgspec.Struct]) -> None:
    """Answer orders of the other end, until that is gone or nothing has been ordered for a minute.

    Called by the process, whose argument is the descriptor of its end of the channel.
    """
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    while True:
        try:
            order = channel.receive(kinds, _IDLE_SECONDS)
        except (EOFError, OSError):
            return
        channel.send(answer(order))


def bound_memory(more_bytes: int) -> None:
    """Let this process take no more memory than it has now and `more_bytes`."""
    with suppress(OSError, ValueError):  # systems without such a bound
        now = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, now + more_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def bound_seconds(seconds: float) -> None:
    """End this process by SIGPROF unless this is called again before it has computed for `seconds`; 0: no bound."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
