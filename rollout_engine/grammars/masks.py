"""Masks of the tokens that the grammars of sequences allow next, of all sequences of a step in one call.

C++ fills them, on the threads that compute the model (`kernels.cpu.grammar`), or Python one by one, with the same
result.
"""

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.grammars.compiler import Grammar
from rollout_engine.grammars.native import NativeTokens
from rollout_engine.grammars.vocabulary import GrammarError, MaskBits, Vocabulary, readable
from rollout_engine.kernels.cpu import grammar
from rollout_engine.kernels.cpu.grammar import Followed, Outcome

MAX_MASK_SECONDS = 0.5
"""Computing time of one mask, beyond which its sequence ends with an error."""
_ALL = 0xFFFFFFFF
"""Word of a mask that allows all."""


class GrammarState:
    """Where one sequence stands in its grammar, which is a function of its tokens.

    A token that ends the sequence is allowed exactly where the tokens before it are complete.
    """

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
        """Why it cannot go on."""

    def begin(self) -> None:
        """Wait for the grammar, if need be. Notes what fails."""
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
        elif outcome is not Outcome.FILLED:
            self.failure = self._why(outcome, token_id, seconds)
            self.matcher = None

    def _why(self, outcome: Outcome, token_id: int | None, seconds: float) -> str:
        if outcome is Outcome.SLOW:
            return f"the tokens that may come next took {seconds:.1f} s to find: give a simpler grammar"
        problem = readable(self.matcher.get_error())
        if outcome is Outcome.REFUSED:
            return f"token {token_id} is not allowed ({problem})"
        return f"it cannot go back behind a draft ({problem})" if outcome is Outcome.STUCK else problem


class Asked(NamedTuple):
    """A sequence whose masks are asked for."""

    state: GrammarState
    token_ids: list[int]
    """Its tokens, prompt first; the list may grow between two calls of `Masks.fill`."""
    draft: Sequence[int] = ()
    """Tokens that it may come to have; a mask is asked for behind each of them too."""


class Masks:
    """Fills the masks of N sequences, step after step, none twice."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self._asked = asked
        self._num_drafted = [len(each.draft) for each in asked]
        ends = list(accumulate(1 + num for num in self._num_drafted))
        self.firsts = [0, *ends[:-1]]
        """Which mask is behind each sequence; those behind the tokens of its draft follow."""
        self._num_masks = ends[-1]
        self._columns: _Columns | None = None

    def fill(self) -> np.ndarray:
        """The masks uint32 [N + drafted tokens, words]: bit t % 32 of word t // 32 is token t.

        The states note what fails; a mask of such a sequence, and one behind its end, allows all.
        """
        columns = self._columns_now()
        if columns.vocabulary is None:
            return np.full((self._num_masks, 1), _ALL, np.uint32)
        tokens, ends = self._tokens()
        masks = np.empty((self._num_masks, columns.vocabulary.num_words), np.uint32)
        if columns.vocabulary.native:
            found = self._fill(columns.vocabulary.native, columns, tokens, ends, masks)
        else:
            found = self._fill_in_python(tokens, ends, masks)
        for row in found.outcomes.nonzero()[0].tolist():
            state, outcome = self._asked[row].state, Outcome(int(found.outcomes[row]))
            if state.matcher is not None:
                place = (ends[row - 1] if row else 0) + int(found.places[row])
                token_id = tokens[place] if outcome is Outcome.REFUSED else None
                state.note(outcome, token_id, float(found.seconds[row]))
        return masks

    def _columns_now(self) -> "_Columns":
        """The columns, made again where a sequence has ended, or cannot go on."""
        if self._columns is None:
            for state, _, _ in self._asked:
                if state.vocabulary is None and state.failure is None:
                    state.begin()
        matchers = [each.state.matcher for each in self._asked]
        if self._columns is None or self._columns.matchers != matchers:
            self._columns = _Columns.of([each.state for each in self._asked], matchers)
        return self._columns

    def _tokens(self) -> tuple[list[int], list[int]]:
        """Tokens that are new to the matchers, which count as having taken them now, with drafts, and their ends."""
        tokens: list[int] = []
        ends = []
        for state, token_ids, draft in self._asked:
            tokens += token_ids[state.num_followed :]
            tokens += draft
            ends.append(len(tokens))
            state.num_followed = len(token_ids)
        return tokens, ends

    def _fill(
        self, native: NativeTokens, columns: "_Columns", tokens: list[int], ends: list[int], masks: np.ndarray
    ) -> Followed:
        """Fill the masks by C++."""
        return grammar.fill(
            native.functions,
            columns.addresses,
            np.array(tokens, np.uint32),
            np.array(ends, np.int64),
            np.array(self._num_drafted, np.int64),
            columns.bits,
            masks,
            np.array(self.firsts, np.int64),
            MAX_MASK_SECONDS,
        )

    def _fill_in_python(self, tokens: list[int], ends: list[int], masks: np.ndarray) -> Followed:
        """Fill the masks by llguidance's Python objects: the twin of `grammar.cpp`."""
        found, start = Followed(len(ends)), 0
        for row, (state, _, draft) in enumerate(self._asked):
            new, own = tokens[start : ends[row] - len(draft)], masks[self.firsts[row] :][: 1 + len(draft)]
            outcome, found.places[row], found.seconds[row] = _follow(state, new, draft, own)
            if outcome is not Outcome.FILLED:
                own.fill(_ALL)
            found.outcomes[row], start = outcome, ends[row]
        return found


class _Columns(NamedTuple):
    """What C++ reads of N sequences that stays the same while all of them go on; see `kernels.cpu.grammar.fill`."""

    vocabulary: Vocabulary | None
    """None where no grammar has compiled."""
    matchers: list[Any]
    """A sequence's matcher; None behind its end, and where it cannot go on."""
    addresses: np.ndarray
    bits: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(cls, states: Sequence[GrammarState], matchers: list[Any]) -> "_Columns":
        vocabulary = next((state.vocabulary for state in states if state.vocabulary is not None), None)
        none = np.empty(0, np.uint64)
        if vocabulary is None or not vocabulary.native:
            return cls(vocabulary, matchers, none, (none, none))
        any_bits = vocabulary.bits(())
        bits = [any_bits if state.matcher is None else state.bits for state in states]
        return cls(
            vocabulary,
            matchers,
            np.array([0 if matcher is None else matcher.address for matcher in matchers], np.uint64),
            (np.array([b.text_address for b in bits], np.uint64), np.array([b.stops_address for b in bits], np.uint64)),
        )


def _follow(state: GrammarState, new: list[int], draft: Sequence[int], masks: np.ndarray) -> tuple[Outcome, int, float]:
    """Fill the masks of one sequence; returns what became of it, the place of a refused token, and a mask's seconds."""
    if state.matcher is None:
        return Outcome.ENDED, 0, 0.0
    for place, token_id in enumerate(new):
        if state.ends_with(token_id):
            return Outcome.ENDED, 0, 0.0
        if not state.matcher.consume_token(token_id):
            return Outcome.REFUSED, place, 0.0
    outcome, slowest = _fill_one(state, masks[0])
    num_right = 0
    for token_id in draft:
        if outcome is not Outcome.FILLED or state.ends_with(token_id):
            break
        if state.matcher.try_consume_tokens([token_id]) != 1:
            break
        num_right += 1
        outcome, seconds = _fill_one(state, masks[num_right])
        slowest = max(slowest, seconds)
    masks[num_right + 1 :] = _ALL  # what is drawn behind a token that cannot come is dropped
    if outcome is Outcome.FILLED and num_right and not state.matcher.rollback(num_right):
        outcome = Outcome.STUCK
    return outcome, 0, slowest


def _fill_one(state: GrammarState, mask: np.ndarray) -> tuple[Outcome, float]:
    """Fill a mask, uint32 [words], where the matcher stands."""
    matcher, seconds = state.matcher, 0.0
    if matcher.is_stopped():
        mask.fill(0)
    else:
        start = time.thread_time()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        seconds = time.thread_time() - start
        if seconds > MAX_MASK_SECONDS:
            return Outcome.SLOW, seconds
    if matcher.is_error():
        return Outcome.FAILED, seconds
    mask &= state.bits.text
    if matcher.is_accepting():
        mask |= state.bits.stops
    return Outcome.FILLED, seconds


def forbid(logits: Tensor, masks: np.ndarray) -> None:
    """Set the logits float32 [N, V] of tokens that the masks, uint32 [N, words], do not allow to -inf, in place."""
    forbidden = np.unpackbits(~masks.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
    logits.masked_fill_(torch.from_numpy(forbidden[:, : logits.shape[1]]), -torch.inf)
