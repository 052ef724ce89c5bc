"""A process that compiles grammars on trial: ``python -m rollout_engine.grammars.trial_main SOCKET``.

It is killed if a grammar takes too long or too much memory, and nothing else is. SOCKET is the descriptor of its end
of the connection to `rollout_engine.grammars.trials`, whose messages it answers one by one.
"""

import random
from typing import Any

import msgspec
import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.children.bounded import answer_orders, bound_memory, bound_seconds
from rollout_engine.grammars.trial_wire import Answer, Setup, Trial
from rollout_engine.grammars.vocabulary import GrammarError, Vocabulary, readable

_MORE_BYTES = 2 << 30
"""Memory that it may take beyond its size with the tokenizer loaded."""
_NUM_WALKED = 32
"""Tokens of a random output whose masks are computed."""


def main() -> None:
    """Answer until the other end is gone, or no message has arrived for a minute."""
    answer_orders(Setup | Trial, _Trials().answer)


class _Trials:
    def __init__(self) -> None:
        self._vocabulary: Vocabulary | GrammarError = GrammarError("it has no tokenizer yet")
        self._seconds = 0.0

    def answer(self, order: Setup | Trial) -> Answer:
        if isinstance(order, Trial):
            bound_seconds(self._seconds)
            problem = _problem(self._vocabulary, order.text)
            bound_seconds(0.0)
            return Answer(problem)
        self._seconds = order.seconds
        try:
            self._vocabulary = Vocabulary(order.tokenizer, order.vocab_size, order.eos_token_ids)
        except (GrammarError, RequestError) as error:
            self._vocabulary = GrammarError(str(error))
        bound_memory(_MORE_BYTES)
        return Answer(str(self._vocabulary) if isinstance(self._vocabulary, GrammarError) else "")


def _problem(vocabulary: Vocabulary | GrammarError, text: str) -> str:
    """Why structured outputs, as JSON, cannot be served; empty if they can."""
    try:
        if isinstance(vocabulary, GrammarError):
            raise vocabulary
        matcher = vocabulary.compile(msgspec.json.decode(text))
        _walk(matcher, vocabulary.num_words)
    except GrammarError as problem:
        return str(problem)
    return ""


def _walk(matcher: Any, num_words: int) -> None:
    """Compute the masks of a random output. Raises `GrammarError` if it cannot begin or continue."""
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


if __name__ == "__main__":
    main()
