"""The state of one sequence in its grammar."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout_engine.grammars.compiler import Grammar
from rollout_engine.grammars.vocabulary import GrammarError, StopBits, Vocabulary, readable


class GrammarState:
    """The place of one sequence in its grammar, a function of the sequence's tokens.

    A token that ends the sequence is allowed exactly if the tokens before it are complete.
    """

    __slots__ = ("_grammar", "_stop_ids", "_stops", "failure", "matcher", "num_followed", "vocabulary")

    def __init__(self, grammar: Grammar, num_prompt_tokens: int, stop_ids: Sequence[int]) -> None:
        self._grammar = grammar
        self._stop_ids = tuple(stop_ids)
        self._stops: StopBits
        self.vocabulary: Vocabulary | None = None
        """The tokens that its grammar was compiled for; None before `begin`."""
        self.matcher: Any = None
        """An `LLMatcher`; None before `begin`, behind the sequence's end, and after a failure."""
        self.num_followed = num_prompt_tokens
        """Tokens of the sequence that the matcher has taken, and its prompt, which it never sees."""
        self.failure: str | None = None
        """The reason why the sequence cannot continue; None while it can."""

    def begin(self) -> None:
        """Wait for the grammar, if need be. Notes a failure."""
        try:
            self.vocabulary, self.matcher = self._grammar.start()
            self._stops = self.vocabulary.stop_bits(self._stop_ids)
        except GrammarError as problem:
            self.failure = str(problem)

    def end(self) -> None:
        """Give the matcher back, for the next sequence of its grammar."""
        if self.matcher is not None:
            self._grammar.take_back(self.matcher)
            self.matcher = None

    def fail(self, reason: str) -> None:
        """Note that the sequence cannot continue."""
        self.failure, self.matcher = reason, None

    def follow(self, token_ids: Sequence[int]) -> bool:
        """Take the sequence's new tokens; whether its matcher now stands behind them, as it has not ended or failed."""
        matcher = self.matcher
        if matcher is None:
            return False
        for token_id in token_ids:
            if token_id in self._stop_ids:
                self.end()
                return False
            if not matcher.consume_token(token_id):
                self.fail(f"token {token_id} is not allowed ({readable(matcher.get_error())})")
                return False
        return True

    def try_draft(self, token_id: int) -> bool:
        """Take a drafted token, if the grammar allows it and it does not end the sequence."""
        return token_id not in self._stop_ids and self.matcher.try_consume_tokens([token_id]) == 1

    def leave_draft(self, num_tokens: int) -> None:
        """Go back to the place before the last `num_tokens`, which were drafted."""
        if num_tokens and not self.matcher.rollback(num_tokens):
            self.fail(f"it cannot go back behind a draft ({readable(self.matcher.get_error())})")

    def allows(self, token_id: int) -> bool:
        """Whether the mask here has the token; False also if that is not known without the mask."""
        matcher = self.matcher
        if token_id in self._stop_ids:
            return bool(matcher.is_accepting())
        if not self._stops.can_be_told[token_id] or matcher.is_stopped():
            return False
        return bool(matcher.validate_tokens([token_id]) == 1)

    def finish_mask(self, mask: np.ndarray) -> None:
        """Make llguidance's mask, uint32 [words], that of this sequence: its own tokens end it. Notes a failure."""
        if self.matcher.is_stopped():
            mask.fill(0)
        mask &= self._stops.others
        if self.matcher.is_accepting():
            mask |= self._stops.stops
        if self.matcher.is_error():
            self.fail(readable(self.matcher.get_error()))
