"""A process that compiles grammars on trial: ``python -m rollout_engine.grammars.trial_main SOCKET``.

It is killed where a grammar takes too long or too much memory, and nothing else is. SOCKET is the descriptor of its end
of the connection to `rollout_engine.grammars.trials`, whose messages it answers one by one.
"""

import random
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import psutil

from rollout_engine.errors import RequestError
from rollout_engine.grammars.trial_wire import Answer, Setup, Trial, receive, send
from rollout_engine.grammars.vocabulary import GrammarError, Vocabulary, readable

_MORE_BYTES = 2 << 30
"""Memory that it may take beyond what it has with the tokenizer."""
_IDLE_SECONDS = 60.0
"""After so long without an order it ends itself."""
_NUM_WALKED = 32
"""Tokens of a random output whose masks are computed."""


def main() -> None:
    """Answer until the other end is gone, or nothing has come for a minute."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.settimeout(_IDLE_SECONDS)
    vocabulary: Vocabulary | GrammarError = GrammarError("it has no tokenizer yet")
    seconds = 0.0
    while True:
        try:
            order = receive(connection, Setup | Trial)
        except (EOFError, OSError):
            return
        if isinstance(order, Setup):
            seconds = order.seconds
            try:
                vocabulary = Vocabulary(order.tokenizer, order.vocab_size, order.eos_token_ids)
            except (GrammarError, RequestError) as error:
                vocabulary = GrammarError(str(error))
            _bound_memory()
            send(connection, Answer(str(vocabulary) if isinstance(vocabulary, GrammarError) else ""))
        else:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF then ends the process
            problem = _problem(vocabulary, order.text)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            send(connection, Answer(problem))


def _problem(vocabulary: Vocabulary | GrammarError, text: str) -> str:
    """Why structured outputs, as JSON, cannot be served; empty where they can."""
    try:
        if isinstance(vocabulary, GrammarError):
            raise vocabulary
        matcher = vocabulary.compile(msgspec.json.decode(text))
        _walk(matcher, vocabulary.num_words)
    except GrammarError as problem:
        return str(problem)
    return ""


def _walk(matcher: Any, num_words: int) -> None:
    """Compute the masks of a random output. Raises `GrammarError` where it cannot begin, or does not go on."""
    mask, rng = np.zeros(num_words, np.uint32), random.Random(0)
    for place in range(_NUM_WALKED):
        if matcher.is_stopped() and not matcher.is_error():
            return
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        if len(allowed) and not matcher.is_error():
            matcher.consume_token(int(rng.choice(allowed)))
        if matcher.is_error():
            raise GrammarError(readable(matcher.get_error()))
        if not len(allowed):
            raise GrammarError("no output has this form" if not place else "some outputs cannot go on, nor end")


def _bound_memory() -> None:
    with suppress(OSError, ValueError):  # where the system has no such bound
        now = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (now + _MORE_BYTES, now + _MORE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
