"""Grammars on trial: compiled in a process of their own first, since some take hours or all memory to compile.

require ── Trial ──> trial_main: compiles it, and the masks of a random output, in bounded time and memory
        <── Answer, or the process ends: the grammar is refused, and the next one gets another process
"""

import os
import signal
import socket
import subprocess
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout_engine.errors import LifecycleError, RequestError, RetryableError
from rollout_engine.grammars.trial_wire import Answer, Setup, Trial, receive, send
from rollout_engine.grammars.vocabulary import GrammarError, require_llguidance
from rollout_engine.parent_death import module_command, start_process
from rollout_engine.structured_outputs import text_of
from sync.owner_process import OwnerProcess

MAX_SECONDS = 0.8
"""Computing time of a trial."""
_PATIENCE = 30.0
"""Seconds until the process is given up, whatever it computes: a busy machine may keep it from computing."""
_MAX_KNOWN = 4096
"""Answers that are remembered."""
_MODULE = "rollout_engine.grammars.trial_main"


class GrammarTrials:
    """Tries grammars, each once, in one process at a time, which starts with the first and ends with this object.

    Args:
        read_tokenizer: the tokenizer as `tokenizer.json` has it; called for each process. May raise `GrammarError`.
        vocab_size: of the model.
        eos_token_ids: end ids.
    """

    def __init__(self, read_tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._read_tokenizer = read_tokenizer
        self._vocab_size, self._eos_token_ids = vocab_size, list(eos_token_ids)
        self._known: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self._processes: list[_TrialProcess] = []
        """One, or none."""
        self.close = weakref.finalize(self, _end_all, self._processes)
        """End the process."""

    def knows(self, given: Mapping[str, Any]) -> bool:
        """Whether `require` answers at once."""
        try:
            return text_of(given) in self._known
        except (TypeError, ValueError):  # no JSON: it is refused before it is tried
            return True

    def require(self, given: Mapping[str, Any]) -> None:
        """Raise `RequestError` unless structured outputs compile. Blocks for the time of a trial.

        Raises `LifecycleError` if `close` is called meanwhile.
        """
        require_llguidance(given)
        text = text_of(given)
        with self._lock:
            problem = self._known.get(text)
            if problem is None:
                problem = self._known[text] = self._try(text)
                if len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        if problem:
            raise RequestError.for_field("structured_outputs", given, "a grammar that can be compiled", problem)

    def _try(self, text: str) -> str:
        for is_last in (False, True):
            known = next(iter(self._processes), None)
            process = known or self._start()
            try:
                if known is None:
                    self._set_up(process)
                return process.ask(Trial(text))
            except GrammarError as problem:
                self._end(process)
                return f"The tokenizer cannot be read: {problem}."
            except (OSError, EOFError):
                was_idle, reason = self._end(process)
                if is_last or not was_idle:
                    return reason
        raise AssertionError("two processes were asked")

    def _start(self) -> "_TrialProcess":
        process = _TrialProcess()
        self._processes.append(process)
        if not self.close.alive:
            self._end(process)
            raise _closed()
        return process

    def _set_up(self, process: "_TrialProcess") -> None:
        setup = Setup(self._read_tokenizer(), self._vocab_size, self._eos_token_ids, MAX_SECONDS)
        if problem := process.ask(setup):
            raise GrammarError(problem)

    def _end(self, process: "_TrialProcess") -> tuple[bool, str]:
        """End the process, which has not answered. Returns whether it had ended itself, and why for users.

        Raises `LifecycleError` if `close` has ended it.
        """
        try:
            self._processes.remove(process)
        except ValueError:
            raise _closed() from None
        status = process.end()
        if status == 0:
            return True, "The process that compiles grammars ended; send the request again."
        if status == -signal.SIGPROF:
            return False, f"It takes more than {MAX_SECONDS:g} s to compile: give a smaller or simpler one."
        return False, f"It takes too much memory or time to compile (status {status}): give a smaller or simpler one."


class _TrialProcess:
    """A process that compiles grammars, held from here."""

    def __init__(self) -> None:
        """Raises `RetryableError` where the system starts no process."""
        here, there = socket.socketpair()
        root = str(Path(__file__).parents[2])
        try:
            self._process = start_process(
                module_command(_MODULE, [str(there.fileno())]),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # where memory ends, Rust says so there
                pass_fds=[there.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        except OSError as problem:
            here.close()
            what = f"A process that compiles grammars cannot start ({problem})"
            raise RetryableError(f"{what}: end processes, or allow more, and send the request again.") from problem
        finally:
            there.close()
        here.settimeout(_PATIENCE)
        self._connection, self._owner = here, OwnerProcess()

    def ask(self, order: Setup | Trial) -> str:
        """The problem that it answers with; empty for none. Raises `OSError` and `EOFError` where it does not."""
        if not self._owner.is_current:
            raise EOFError(self._owner.error_message("the process that compiles grammars"))
        send(self._connection, order)
        answer: Answer = receive(self._connection, Answer)
        return answer.problem

    def end(self) -> int:
        """End it. Returns its exit status, or minus the signal that ended it; 0 in a forked child, not its owner."""
        if not self._owner.is_current:
            self._connection.close()  # this copy alone
            return 0
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # `ask` may wait on another thread
        self._connection.close()
        try:
            return self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _closed() -> LifecycleError:
    return LifecycleError("structured_outputs: the engine was shut down while it tried the grammar; make a new one.")


def _end_all(processes: list[_TrialProcess]) -> None:
    while processes:
        processes.pop().end()
