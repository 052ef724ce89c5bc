"""Grammars of an engine's requests: compiled on a thread of their own, once for all that ask for the same."""

import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from rollout_engine.base import threads
from rollout_engine.base.errors import RequestError, RetryableError
from rollout_engine.base.structured_outputs import text_of
from rollout_engine.grammars.vocabulary import GrammarError, Vocabulary

_MAX_KEPT = 1024
"""Grammars that are kept for the next request that asks for the same."""
_MAX_IDLE = 256
"""Matchers that are kept while no sequence has them, with the masks that they have learned."""
_MAX_COMPILE_SECONDS = 10.0
"""Longest that a request waits for its grammar, a tokenizer that is being read included."""


class DaemonThread:
    """Runs functions one after the other, on a thread that starts with the first and ends with the interpreter."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._has_started = False

    def submit(self, function: Callable[[], object]) -> None:
        """Run a function that raises nothing; here, at once, where the system starts no thread."""
        with self._lock:
            if not self._has_started:
                try:
                    threads.start_thread(_run, self._queue, name=self._name)
                except RetryableError:
                    function()
                    return
                self._has_started = True
        self._queue.put(function)

    def close(self) -> None:
        """Let the thread end when it has run what it was given."""
        with self._lock:
            if self._has_started:
                self._queue.put(None)
                self._has_started = False


class Grammar:
    """A grammar, compiled or on its way."""

    def __init__(self, idle: "deque[tuple[Grammar, Any]]") -> None:
        """`idle`: matchers of all grammars that no sequence has now, the oldest first."""
        self._idle = idle
        self.compiled: Future[tuple[Vocabulary, Any]] = Future()
        self._deadline = time.monotonic() + _MAX_COMPILE_SECONDS

    def is_ready(self, seconds: float) -> bool:
        """Wait up to `seconds`; whether `start` then has its result, or raises, at once."""
        if seconds and not self.compiled.done():
            wait([self.compiled], seconds)
        return self.compiled.done() or time.monotonic() >= self._deadline

    def start(self) -> tuple[Vocabulary, Any]:
        """The vocabulary, and a matcher of `Vocabulary.begin`. Waits where it is on its way. Raises `GrammarError`."""
        try:
            vocabulary, matcher = self.compiled.result(max(0.0, self._deadline - time.monotonic()))
        except TimeoutError:
            raise GrammarError(f"it was not compiled in {_MAX_COMPILE_SECONDS:g} s") from None
        for place in reversed(range(len(self._idle))):
            grammar, used = self._idle[place]
            if grammar is self:
                del self._idle[place]
                return vocabulary, used
        return vocabulary, matcher.deep_copy()

    def take_back(self, matcher: Any) -> None:
        """Keep a matcher for the next sequence: it has learned masks that a new one would have to compute."""
        if not matcher.is_error():
            matcher.reset()
            self._idle.append((self, matcher))


class GrammarCompiler:
    """Compiles grammars on a thread. `load` reads the tokenizer, with the first of them, on that thread."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._vocabulary: Vocabulary | None = None
        self._known: OrderedDict[str, Grammar] = OrderedDict()
        self._idle: deque[tuple[Grammar, Any]] = deque(maxlen=_MAX_IDLE)
        self._lock = threading.Lock()
        self._thread = DaemonThread("grammars")

    def grammar(self, given: Mapping[str, Any]) -> Grammar:
        """The grammar of structured outputs; begins to compile it where it is not known. Any thread may ask."""
        text = text_of(given)
        with self._lock:
            found = self._known.get(text)
            if found is None:
                found = self._known[text] = Grammar(self._idle)
                self._thread.submit(lambda: self._compile(given, found))
            self._known.move_to_end(text)
            if len(self._known) > _MAX_KEPT:
                self._known.popitem(last=False)
        return found

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def _compile(self, given: Mapping[str, Any], grammar: Grammar) -> None:
        try:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            grammar.compiled.set_result((self._vocabulary, self._vocabulary.begin(given)))
        except (GrammarError, RequestError) as problem:
            grammar.compiled.set_exception(GrammarError(str(problem)))
        except BaseException as problem:  # a tokenizer's files may raise anything, and a panic of Rust is no Exception
            grammar.compiled.set_exception(GrammarError(f"{type(problem).__name__}: {problem}"))


def _run(functions: "queue.SimpleQueue[Callable[[], object] | None]") -> None:
    while (function := functions.get()) is not None:
        function()
