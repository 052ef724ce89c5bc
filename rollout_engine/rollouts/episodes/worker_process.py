"""The process of one worker, held from here: started, asked, ended, and why it died."""

import signal
from collections.abc import Sequence
from contextlib import suppress
from subprocess import Popen

import msgspec

from rollout_engine.base.errors import RetryableError
from rollout_engine.children.child import Child
from rollout_engine.children.process import environment_with_package, start_module
from rollout_engine.rollouts.episodes.env_wire import End, Load, Order, Reply, Reuse, encode_order
from rollout_engine.rollouts.episodes.factory_reference import WORKER_MODULE, FactoryReference

_IDLE_SECONDS = 60.0
"""Seconds without an order and without an episode after which a worker ends itself."""
_HASH_SEED = "0"
"""Sets of texts have the same order in every worker, so that episodes of one seed are alike."""
_GRACE_SECONDS = 1.0
"""Seconds that a worker has to end after its channel is closed."""


class WorkerLostError(Exception):
    """The process ended before it replied; the message describes how. `has_begun`: it had read the order."""

    def __init__(self, message: str, *, has_begun: bool = True) -> None:
        super().__init__(message)
        self.has_begun = has_begun


class WorkerProcess(Child):
    """A worker process, into which the factory is to be loaded first. One thread at a time may call `carry_out`."""

    def __init__(self) -> None:
        """Raises `RetryableError` if the system starts no process."""
        try:
            super().__init__(_start)
        except OSError as problem:
            what = f"A process for environments cannot start ({problem})"
            raise RetryableError(f"{what}: end processes, or allow more, and call again.") from problem
        self._is_killed, self._num_orders, self._num_unanswered = False, 0, 0

    @property
    def is_sound(self) -> bool:
        """Whether it runs, has answered every order, was not killed, and belongs to this process."""
        return self.is_ours and self.is_alive and not self._num_unanswered and not self._is_killed

    def load(self, reference: FactoryReference) -> str:
        """Let it import the factory. Returns "", or the reason why it cannot. Raises `WorkerLostError`."""
        return self.carry_out(Load(reference)).failure

    def reuse(self) -> str:
        """Ask it to continue with another rollout. Returns "", or the reason why not. Raises `WorkerLostError`."""
        return self.carry_out(Reuse()).failure

    def carry_out(self, order: Order) -> Reply:
        """Have it carry out an order and wait for the reply, as long as the process lives. Raises `WorkerLostError`."""
        if not self.is_ours:
            raise WorkerLostError(self.owner.error_message("it"), has_begun=False)
        number = self._num_orders = self._num_orders + 1
        body = encode_order(number, order)
        self._num_unanswered += 1
        try:
            self.channel.send_body(body)
            reply: Reply = self.receive(Reply)
            if (reply.number, reply.pid) != (number, self.pid):
                raise WorkerLostError(self._break())
            self._num_unanswered -= 1
            return reply
        except (ConnectionResetError, BrokenPipeError):  # it has left bytes of ours unread
            raise WorkerLostError(self._how_it_ended(), has_begun=False) from None
        except msgspec.DecodeError:
            raise WorkerLostError(self._break()) from None
        except (OSError, EOFError):
            raise WorkerLostError(self._how_it_ended()) from None

    def kill(self) -> None:
        """Kill the process and its group, on any thread. A reply that is awaited is then lost."""
        self._is_killed = True
        super().kill()

    def ask_to_end(self) -> None:
        """Let it end soon; no-op if it has ended, and in a forked child, to which it does not belong."""
        with suppress(OSError):
            self.channel.send_body(encode_order(0, End()))

    def end(self, *, kill: bool = False) -> int | None:
        """Let it end, or kill it if it does not; no-op if it has ended, and in a forked child."""
        self.ask_to_end()
        return super().end(kill=kill)

    def _how_it_ended(self) -> str:
        code = self.wait(_GRACE_SECONDS)
        if code is None:
            return self._break()
        if code >= 0:
            return f"exited with status {code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def _break(self) -> str:
        """Kill it: it takes no more orders."""
        self.kill()
        self.wait(None)
        return "broke its connection"


def _start(descriptors: Sequence[int]) -> "Popen[bytes]":
    environment = {"PYTHONHASHSEED": _HASH_SEED, **environment_with_package()}
    return start_module(WORKER_MODULE, [str(_IDLE_SECONDS)], descriptors=descriptors, environment=environment)
