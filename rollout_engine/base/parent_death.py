"""Child processes that do not outlive this one, even if they are stopped or blocked in C: both ends in this file.

    parent   start_process      starts a child on a thread that lasts as long as this process
             module_command     a command that calls `end_with_parent` first, and then runs a module of this package
    child    end_with_parent    has Linux send a signal when the parent ends: SIGKILL, or SIGCONT to a child that
                                notices the end by other means, unless it is stopped

Linux takes the end of the thread that started a child for the end of its parent, hence the lasting thread. Systems
other than Linux have no such signal: there a child ends when it notices that its socket to the parent is closed.
"""

import ctypes
import os
import queue
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from rollout_engine.base.threads import start_thread

_PR_SET_PDEATHSIG = 1


def start_process(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Run `subprocess.Popen(command, **options)`, for a child that calls `end_with_parent`.

    Raises as `Popen` does, and `RetryableError` if the system starts no thread.
    """
    outcome: Future[subprocess.Popen[bytes]] = Future()
    work = partial(_start_as, _processors(), partial(subprocess.Popen, command, **options))
    _Starter.of_this_process().work.put((work, outcome))
    interrupt: BaseException | None = None
    while not outcome.done():  # also if interrupted: the child inherits descriptors that the caller would close
        try:
            outcome.exception()
        except BaseException as problem:
            interrupt = problem
    if interrupt is not None:
        if outcome.exception() is None:
            outcome.result().kill()
        raise interrupt
    return outcome.result()


def module_command(module: str, arguments: Sequence[str], number: int = signal.SIGKILL) -> list[str]:
    """The command of a child that runs a module of this package, as its main one, under `end_with_parent`.

    It has asked for the signal `number` before it imports the module, which may take seconds.
    """
    return [sys.executable, "-P", "-m", __name__, str(os.getpid()), str(int(number)), module, *arguments]


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the system send this process a signal when its parent ends, at once if it has; call it on the main thread.

    Args:
        parent: process id of the parent, which has called `start_process`.
        number: SIGKILL, or SIGCONT.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it ended before
            os.kill(os.getpid(), number)


def _processors() -> set[int]:
    """The processors that this thread may use, where the system says."""
    return os.sched_getaffinity(0) if sys.platform == "linux" else set()


def _start_as(processors: set[int], start: Callable[[], Any]) -> Any:
    """Start a process that may use these processors: it inherits them from the thread that starts it."""
    if sys.platform == "linux" and processors != _processors():
        os.sched_setaffinity(0, processors)
    return start()


class _Starter:
    """The thread that starts children, one for each process."""

    _latest: "_Starter | None" = None

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        start_thread(self._run, name="process-starter")

    @classmethod
    def of_this_process(cls) -> "_Starter":
        """The thread of this process; a forked child has none of its parent's."""
        starter = cls._latest
        if starter is None or starter._pid != os.getpid():
            starter = cls._latest = cls()
        return starter

    def _run(self) -> None:
        while True:
            start, outcome = self.work.get()
            try:
                outcome.set_result(start())
            except BaseException as problem:
                outcome.set_exception(problem)
            del start, outcome


def main() -> None:
    """Run the module that `module_command` names."""
    parent, number, module, *arguments = sys.argv[1:]
    end_with_parent(int(parent), int(number))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
