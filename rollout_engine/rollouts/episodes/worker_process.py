"""The process of one worker, held from here: started, asked, ended, and why it died."""

import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import msgspec

from rollout_engine.base.errors import RetryableError
from rollout_engine.base.parent_death import module_command, start_process
from rollout_engine.rollouts.episodes.env_wire import (
    End,
    Load,
    Order,
    Reply,
    Reuse,
    encode_order,
    look_every,
    receive_reply,
    send,
)
from rollout_engine.rollouts.episodes.factory_reference import WORKER_MODULE, FactoryReference
from rollout_engine.rollouts.episodes.group_guard import GroupGuard
from sync.owner_process import OwnerProcess

_LOOK_SECONDS = 0.5
"""How often to look whether it lives. What it forks may hold its end of the connection."""
_IDLE_SECONDS = 60.0
"""After so long without an order and without an episode, it ends itself."""
_HASH_SEED = "0"
"""Sets of texts have the same order in every worker, so that episodes of one seed are alike."""
_GRACE_SECONDS = 1.0
"""From the end of its connection to its own."""
_END_SECONDS = 5.0


_GUARD = GroupGuard()


class WorkerLostError(Exception):
    """The process ended before it replied; the message says how. `has_begun`: it had read the order."""

    def __init__(self, message: str, *, has_begun: bool = True) -> None:
        super().__init__(message)
        self.has_begun = has_begun


class WorkerProcess:
    """A worker process, into which the factory is to be loaded first. One thread at a time may `ask`."""

    def __init__(self) -> None:
        """Raises `RetryableError` where the system starts no process."""
        here, there = socket.socketpair()
        try:
            arguments = [str(there.fileno()), str(os.getpid()), str(_IDLE_SECONDS)]
            self._process = start_process(
                module_command(WORKER_MODULE, arguments),
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                env={"PYTHONHASHSEED": _HASH_SEED, **os.environ, "PYTHONPATH": _python_path()},
                start_new_session=True,  # Ctrl-C is the parent's to handle; what it starts is in a group of its own
            )
        except BaseException as problem:
            here.close()
            if not isinstance(problem, OSError):
                raise
            what = f"A process for environments cannot start ({problem})"
            raise RetryableError(f"{what}: end processes, or allow more, and call again.") from problem
        finally:
            there.close()
        _GUARD.add(self.pid)
        look_every(here, _LOOK_SECONDS)
        self._connection, self._owner = here, OwnerProcess()
        self._is_killed, self._num_orders, self._num_unanswered = False, 0, 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._status() is None

    @property
    def is_sound(self) -> bool:
        """Whether it runs, has answered every order, was not killed, and belongs to this process."""
        is_ours = self._owner.is_current
        return is_ours and self.is_alive and not self._num_unanswered and not self._is_killed

    def load(self, reference: FactoryReference) -> str:
        """Let it import the factory. Returns "", or the reason why it cannot. Raises `WorkerLostError`."""
        return self.ask(Load(reference)).failure

    def reuse(self) -> str:
        """Ask it to go on with another rollout. Returns "", or the reason why not. Raises `WorkerLostError`."""
        return self.ask(Reuse()).failure

    def ask(self, order: Order) -> Reply:
        """Give an order and wait for its reply, as long as the process lives. Raises `WorkerLostError`."""
        if not self._owner.is_current:
            raise WorkerLostError(self._owner.error_message("it"), has_begun=False)
        number = self._num_orders = self._num_orders + 1
        frame = encode_order(number, order)
        self._num_unanswered += 1
        try:
            send(self._connection, frame)
            reply = receive_reply(self._connection, lambda: self.is_alive)
            if (reply.number, reply.pid) != (number, self.pid):
                raise WorkerLostError(self._broken())
            self._num_unanswered -= 1
            return reply
        except (ConnectionResetError, BrokenPipeError):  # it has left bytes of ours unread
            raise WorkerLostError(self._how_it_ended(), has_begun=False) from None
        except msgspec.DecodeError:
            raise WorkerLostError(self._broken()) from None
        except (OSError, EOFError):
            raise WorkerLostError(self._how_it_ended()) from None

    def kill(self) -> None:
        """Kill the process and its group, on any thread. A reply that is awaited is then lost."""
        self._is_killed = True
        if self._owner.is_current and self._status() is None:
            self._kill_group()

    def ask_to_end(self) -> None:
        """Let it end soon; no-op if it has ended, and in a forked child, to which it does not belong."""
        if self._owner.is_current:
            with suppress(OSError):
                send(self._connection, encode_order(0, End()))

    def end(self) -> None:
        """Let it end, or kill it if it does not; no-op if it has ended, and in a forked child."""
        if not self._owner.is_current:
            self._connection.close()
            return
        self.ask_to_end()
        if self._status(_END_SECONDS) is None:
            self._kill_group()
            self._status(None)
        self._connection.close()

    def _status(self, seconds: float | None = 0.0) -> int | None:
        """Its exit status; None if it still runs after `seconds`. What is left of its group ends with it."""
        if self._process.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                self._kill_group()  # now: later another process may have its number
                _GUARD.remove(self.pid)
        return self._process.returncode

    def _kill_group(self) -> None:
        """Kill it, and what it has started, unless that has left its process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _how_it_ended(self) -> str:
        code = self._status(_GRACE_SECONDS)
        if code is None:
            return self._broken()
        if code >= 0:
            return f"exited with status {code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def _broken(self) -> str:
        self._kill_group()
        self._status(None)  # it takes no more orders
        return "broke its connection"


def _python_path() -> str:
    """PYTHONPATH by which the child imports this copy of the package."""
    root = str(Path(__file__).parents[2])
    return os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
