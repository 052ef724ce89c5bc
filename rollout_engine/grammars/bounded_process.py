"""A process that computes for a front end and may be killed: for work that a stranger's text can make endless.

ask ── a message ──> `answer_orders` in the process: answers it in bounded time and memory
    <── an answer, or the process ends: the work is refused, and the next one gets another process
"""

import os
import resource
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from rollout_engine.base.errors import LifecycleError, RetryableError
from rollout_engine.base.parent_death import module_command, start_process
from rollout_engine.grammars.trial_wire import receive, send
from sync.owner_process import OwnerProcess

_Answer = TypeVar("_Answer", bound=msgspec.Struct)
_IDLE_SECONDS = 60.0
"""After this time without an order the process ends itself."""


class BoundedProcess:
    """A process that runs a module of this package, held from here.

    Args:
        module: its name. It calls `answer_orders`.
        work: what it does, for errors: "compiles grammars".
        patience: seconds until it is given up, whatever it computes: a busy machine may keep it from computing.
    """

    def __init__(self, module: str, work: str, patience: float) -> None:
        """Raises `RetryableError` if the system starts no process."""
        here, there = socket.socketpair()
        root = str(Path(__file__).parents[2])
        try:
            self._process = start_process(
                module_command(module, [str(there.fileno())]),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # libraries report there that memory has run out
                pass_fds=[there.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        except OSError as problem:
            here.close()
            what = f"A process that {work} cannot start ({problem})"
            raise RetryableError(f"{what}: end processes, or allow more, and send the request again.") from problem
        finally:
            there.close()
        here.settimeout(patience)
        self._connection, self._owner, self._work = here, OwnerProcess(), work

    def ask(self, order: msgspec.Struct, kind: type[_Answer]) -> _Answer:
        """The answer to an order. Raises `OSError` and `EOFError` if there is none."""
        if not self._owner.is_current:
            raise EOFError(self._owner.error_message(f"the process that {self._work}"))
        send(self._connection, order)
        answer: _Answer = receive(self._connection, kind)
        return answer

    def end(self) -> int:
        """End it. Returns its exit status, or minus the signal that ended it; 0 in a forked child, not its owner."""
        if not self._owner.is_current:
            self._connection.close()
            return 0
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # `ask` may wait on another thread
        self._connection.close()
        try:
            return self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class OneProcess:
    """Keeps at most one `BoundedProcess`, which starts when it is first asked for and is replaced when it has failed.

    It ends with this object. Not for several threads at once, but for `close`.

    Args:
        module, work, patience: as of `BoundedProcess`.
        field: what users gave it to work on, for the error of a call that `close` has interrupted.
    """

    def __init__(self, module: str, work: str, patience: float, field: str) -> None:
        self._arguments, self._field = (module, work, patience), field
        self._processes: list[BoundedProcess] = []
        self.close = weakref.finalize(self, _end_all, self._processes)
        """End the process."""

    def get(self) -> tuple[BoundedProcess, bool]:
        """The process, and whether it has just been started. Raises `LifecycleError` after `close`."""
        for process in self._processes:
            return process, False
        process = BoundedProcess(*self._arguments)
        self._processes.append(process)
        if not self.close.alive:
            self.end(process)
            raise self._closed()
        return process, True

    def end(self, process: BoundedProcess) -> int:
        """End the process, which has not answered; its status. Raises `LifecycleError` if `close` has ended it."""
        try:
            self._processes.remove(process)
        except ValueError:
            raise self._closed() from None
        return process.end()

    def _closed(self) -> LifecycleError:
        return LifecycleError(f"{self._field}: the engine was shut down while it was tried; make a new one.")


def _end_all(processes: list[BoundedProcess]) -> None:
    while processes:
        processes.pop().end()


def answer_orders(kinds: Any, answer: Callable[[Any], msgspec.Struct]) -> None:
    """Answer orders of the other end, until that is gone or nothing has been ordered for a minute.

    Called by the process, whose last argument is the descriptor of its end of the connection.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.settimeout(_IDLE_SECONDS)
    while True:
        try:
            order = receive(connection, kinds)
        except (EOFError, OSError):
            return
        send(connection, answer(order))


def bound_memory(more_bytes: int) -> None:
    """Let this process take no more memory than it has now and `more_bytes`."""
    with suppress(OSError, ValueError):  # systems without such a bound
        now = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, now + more_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def bound_seconds(seconds: float) -> None:
    """End this process by SIGPROF unless this is called again before it has computed for `seconds`; 0: no bound."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
