"""The place of a sequence in its grammar."""

from collections.abc import Sequence
from typing import Any

from rollout_engine.grammars.compiler import Grammar
from rollout_engine.grammars.vocabulary import GrammarError, MaskBits, Vocabulary, readable
from rollout_engine.kernels.cpu.grammar import Outcome


class GrammarState:
    """The place of one sequence in its grammar, a function of the sequence's tokens.

    A token that ends the sequence is allowed exactly where the tokens before it are complete.
    """

    __slots__ = ("_grammar", "_stop_ids", "bits", "failure", "matcher", "num_followed", "vocabulary")

    def __init__(self, grammar: Grammar, num_prompt_tokens: int, stop_ids: Sequence[int]) -> None:
        self._grammar = grammar
        self._stop_ids = tuple(stop_ids)
        self.vocabulary: Vocabulary | None = None
        """The tokens that its grammar was compiled for; None before `begin`."""
        self.matcher: Any = None
        """A matcher of `Vocabulary.begin`; None before `begin`, behind the sequence's end, and after a failure."""
        self.bits: MaskBits
        """The tokens that end the sequence, and those that end none; from `begin` on."""
        self.num_followed = num_prompt_tokens
        """Tokens of the sequence that the matcher has taken, and its prompt, which it never sees."""
        self.failure: str | None = None
        """The reason why the sequence cannot go on; None while it can."""

    def begin(self) -> None:
        """Wait for the grammar, if need be. A failure is noted."""
        try:
            self.vocabulary, self.matcher = self._grammar.start()
            self.bits = self.vocabulary.bits(self._stop_ids)
        except GrammarError as problem:
            self.failure = str(problem)

    def end(self) -> None:
        """Give the matcher back, for the next sequence of its grammar."""
        if self.matcher is not None:
            self._grammar.take_back(self.matcher)
            self.matcher = None

    def ends_with(self, token_id: int) -> bool:
        """Whether this token ends the sequence."""
        return token_id in self._stop_ids

    def note(self, outcome: Outcome, token_id: int | None, seconds: float) -> None:
        """End it, or set `failure`, by an outcome; `token_id`: the refused one; `seconds`: of its slowest mask."""
        if outcome is Outcome.ENDED:
            self.end()
        elif outcome is not Outcome.FOLLOWED:
            self.failure = self._why(outcome, token_id, seconds)
            self.matcher = None

    def _why(self, outcome: Outcome, token_id: int | None, seconds: float) -> str:
        if outcome is Outcome.SLOW:
            return f"the tokens that may come next took {seconds:.1f} s to find: give a simpler grammar"
        problem = readable(self.matcher.get_error())
        if outcome is Outcome.REFUSED:
            return f"token {token_id} is not allowed ({problem})"
        return f"it cannot go back behind a draft ({problem})" if outcome is Outcome.STUCK else problem
