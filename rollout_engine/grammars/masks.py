"""Masks of the tokens that the grammars of sequences allow next, of all sequences of a step in one call.

C++ fills them, on the threads that compute the model (`kernels.cpu.grammar`), or Python one by one, with the same
result.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.grammars.compiler import Grammar
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
        """A matcher of `Vocabulary.begin`; None before `begin`, and behind the sequence's end."""
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
        elif outcome is Outcome.SLOW:
            self.failure = f"the tokens that may come next took {seconds:.1f} s to find: give a simpler grammar"
        else:
            problem = readable(self.matcher.get_error())
            self.failure = {
                Outcome.REFUSED: f"token {token_id} is not allowed ({problem})",
                Outcome.STUCK: f"it cannot go back behind a draft ({problem})",
            }.get(outcome, problem)


class Asked(NamedTuple):
    """A sequence whose masks are asked for."""

    state: GrammarState
    token_ids: list[int]
    draft: Sequence[int] = ()
    """Tokens that it may come to have; a mask is asked for behind each of them too."""


class _Columns(NamedTuple):
    """N sequences as columns; see `kernels.cpu.grammar.fill`."""

    states: list[GrammarState]
    tokens: list[int]
    token_ends: list[int]
    num_drafted: list[int]
    first_masks: list[int]


def masks_behind(asked: Sequence[Asked]) -> tuple[np.ndarray, list[int]]:
    """Masks uint32 [N + drafted tokens, words] of N sequences, none twice, and which of them is behind each sequence.

    Those behind the tokens of its draft follow that one. Bit t % 32 of word t // 32 is token t. The states note what
    fails; a mask of such a sequence, and one behind its end, allows all.
    """
    columns = _columns_of(asked)
    vocabulary = next((state.vocabulary for state in columns.states if state.vocabulary is not None), None)
    num_masks = len(asked) + sum(columns.num_drafted)
    if vocabulary is None:
        return np.full((num_masks, 1), _ALL, np.uint32), columns.first_masks
    masks = np.empty((num_masks, vocabulary.num_words), np.uint32)
    found = _fill(vocabulary, columns, masks) if vocabulary.native else _fill_in_python(columns, masks)
    for row in found.outcomes.nonzero()[0].tolist():
        state = columns.states[row]
        outcome = Outcome(int(found.outcomes[row]))
        if _goes_on(state):
            place = (columns.token_ends[row - 1] if row else 0) + int(found.places[row])
            token_id = columns.tokens[place] if outcome is Outcome.REFUSED else None
            state.note(outcome, token_id, float(found.seconds[row]))
    return masks, columns.first_masks


def _columns_of(asked: Sequence[Asked]) -> _Columns:
    """The columns; from now on the matchers count as having taken the tokens."""
    columns = _Columns([], [], [], [], [])
    num_masks = 0
    for state, token_ids, draft in asked:
        if state.vocabulary is None and state.failure is None:
            state.begin()
        columns.states.append(state)
        columns.tokens.extend(token_ids[state.num_followed :])
        columns.tokens.extend(draft)
        columns.token_ends.append(len(columns.tokens))
        columns.num_drafted.append(len(draft))
        columns.first_masks.append(num_masks)
        num_masks += 1 + len(draft)
        state.num_followed = len(token_ids)
    return columns


def _goes_on(state: GrammarState) -> bool:
    return state.failure is None and state.matcher is not None


def _fill(vocabulary: Vocabulary, columns: _Columns, masks: np.ndarray) -> Followed:
    """Fill the masks by C++."""
    assert vocabulary.native is not None
    going_on = [state if _goes_on(state) else None for state in columns.states]
    some_bits = vocabulary.bits(())
    bits = [some_bits if state is None else state.bits for state in going_on]
    return grammar.fill(
        vocabulary.native.functions,
        np.array([0 if state is None else state.matcher.address for state in going_on], np.uint64),
        np.array(columns.tokens, np.uint32),
        np.array(columns.token_ends, np.int64),
        np.array(columns.num_drafted, np.int64),
        (np.array([b.text_address for b in bits], np.uint64), np.array([b.stops_address for b in bits], np.uint64)),
        masks,
        np.array(columns.first_masks, np.int64),
        MAX_MASK_SECONDS,
    )


def _fill_in_python(columns: _Columns, masks: np.ndarray) -> Followed:
    """Fill the masks by llguidance's Python objects: the twin of `grammar.cpp`."""
    found, start = Followed(len(columns.states)), 0
    for row, state in enumerate(columns.states):
        end, first, num_drafted = columns.token_ends[row], columns.first_masks[row], columns.num_drafted[row]
        tokens, own = columns.tokens[start:end], masks[first : first + 1 + num_drafted]
        new, draft = tokens[: len(tokens) - num_drafted], tokens[len(tokens) - num_drafted :]
        outcome, found.places[row], found.seconds[row] = _follow(state, new, draft, own)
        if outcome is not Outcome.FILLED:
            own.fill(_ALL)
        found.outcomes[row], start = outcome, end
    return found


def _follow(state: GrammarState, new: list[int], draft: list[int], masks: np.ndarray) -> tuple[Outcome, int, float]:
    """Fill the masks of one sequence; returns what became of it, the place of a refused token, and a mask's seconds."""
    if not _goes_on(state):
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
