"""Starts processes of this package that do not outlive this one, even if they are stopped or blocked in native code.

    parent   start_module     starts a child on a thread that lasts as long as this process
    child    end_with_parent  has Linux kill the child when its parent ends; called before its module is imported

Linux takes the end of the thread that started a child for the end of its parent, hence the lasting thread. Systems
other than Linux have no such signal: there the guard (`rollout_engine.children.guard`) kills children that hang.
"""

import ctypes
import os
import queue
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from rollout_engine.base.threads import start_thread

_PR_SET_PDEATHSIG = 1


def start_module(
    module: str,
    arguments: Sequence[str] = (),
    *,
    descriptors: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> "subprocess.Popen[bytes]":
    """Run a module of this package in a new process, which the system kills when this one ends.

    Args:
        module: its name; it is the child's main module.
        arguments: those of its command line, after the numbers of the descriptors.
        descriptors: those that the child inherits.
        environment: all its variables; default: `environment_with_package()`.
        options: more arguments of `subprocess.Popen`.

    Raises as `Popen` does, and `RetryableError` if the system starts no thread.
    """
    return start_process(
        [sys.executable, "-P", "-m", __name__, str(os.getpid()), module, *map(str, descriptors), *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=list(descriptors),
        env=environment_with_package() if environment is None else environment,
        start_new_session=True,  # Ctrl-C is the parent's to handle; the child's own processes are in its group
        **options,
    )


def start_process(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Run `subprocess.Popen(command, **options)`, for a child that calls `end_with_parent`. Raises as it does."""
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


def environment_with_package() -> dict[str, str]:
    """This process's environment, in which a child imports this copy of the package."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path}


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent ends, at once if it has; call it on the main thread.

    `parent`: process id of the parent, which has called `start_process`.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it ended before
            os.kill(os.getpid(), signal.SIGKILL)


def _processors() -> set[int]:
    """The processors that this thread may use, if the system reports them."""
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
    """Run the module that `start_module` names."""
    parent, module, *arguments = sys.argv[1:]
    end_with_parent(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
