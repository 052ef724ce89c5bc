"""Grammars on trial: compiled in a process of their own first, since some take hours or all memory to compile.

require ── Trial ──> trial_main: compiles it, and the masks of a random output, in bounded time and memory
        <── Answer, or the process ends: the grammar is refused, and the next one gets another process
"""

import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.base.structured_outputs import text_of
from rollout_engine.children.bounded import NO_ANSWER, OneProcess
from rollout_engine.children.child import Child
from rollout_engine.grammars.trial_wire import Answer, Setup, Trial
from rollout_engine.grammars.vocabulary import GrammarError, require_llguidance

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
        self._process = OneProcess(_MODULE, "compiles grammars", "structured_outputs")
        self.close = self._process.close
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
        problem = self._known.get(text)  # without the lock: a trial holds it for its time
        if problem is None:
            problem = self._answer(text)
        if problem:
            raise RequestError.for_field("structured_outputs", given, "a grammar that can be compiled", problem)

    def _answer(self, text: str) -> str:
        with self._lock:
            problem = self._known.get(text)
            if problem is None:
                problem = self._known[text] = self._try(text)
                if len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        return problem

    def _try(self, text: str) -> str:
        for is_last in (False, True):
            process, is_new = self._process.get()
            try:
                if is_new:
                    self._set_up(process)
                answer: Answer = process.ask(Trial(text), Answer, _PATIENCE)
                return answer.problem
            except GrammarError as problem:
                self._process.end(process)
                return f"The tokenizer cannot be read: {problem}."
            except NO_ANSWER:
                was_idle, reason = self._end(process)
                if is_last or not was_idle:
                    return reason
        raise AssertionError("two processes were asked")

    def _set_up(self, process: Child) -> None:
        setup = Setup(self._read_tokenizer(), self._vocab_size, self._eos_token_ids, MAX_SECONDS)
        if problem := process.ask(setup, Answer, _PATIENCE).problem:
            raise GrammarError(problem)

    def _end(self, process: Child) -> tuple[bool, str]:
        """End the process, which has not answered. Returns whether it had ended itself, and why for users."""
        status = self._process.end(process)
        if status == 0:
            return True, "The process that compiles grammars ended; send the request again."
        if status == -signal.SIGPROF:
            return False, f"It takes more than {MAX_SECONDS:g} s to compile: give a smaller or simpler one."
        return False, f"It takes too much memory or time to compile (status {status}): give a smaller or simpler one."
