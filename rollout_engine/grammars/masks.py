"""Sequences whose grammars are followed together: masks of the tokens that may come next, of all of them in one call.

C++ follows them, on the threads that compute the model (`kernels.cpu.grammar`), or Python one by one, with the same
result. No mask is filled where a token has been drawn that it would allow.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.grammars.python_masks import Wanted, follow
from rollout_engine.grammars.state import GrammarState
from rollout_engine.grammars.vocabulary import Vocabulary
from rollout_engine.kernels.cpu.grammar import Followed, Matchers, Outcome
from rollout_engine.kernels.cpu.sampling import PreparedRows

MAX_MASK_SECONDS = 0.5
"""Computing time of one mask, beyond which its sequence ends with an error."""


class Asked(NamedTuple):
    """A sequence whose masks are asked for."""

    state: GrammarState
    token_ids: list[int]
    """Its tokens, prompt first; the list may grow between two calls of `GrammarBatch`."""
    draft: Sequence[int] = ()
    """Tokens that it may come to have; a mask is asked for behind each of them too."""


class GrammarBatch:
    """N sequences that are followed together, step after step; none is asked for the same twice.

    A *place* is where one stands behind some tokens: behind its own, and behind each token of its draft. The states
    note what fails.
    """

    def __init__(self, asked: Sequence[Asked]) -> None:
        self._states = [each.state for each in asked]
        self._token_ids = [each.token_ids for each in asked]
        self._drafts = [each.draft for each in asked]
        ends = list(accumulate(1 + len(draft) for draft in self._drafts))
        self.firsts = [0, *ends[:-1]]
        """The place behind each sequence's own tokens; those behind the tokens of its draft follow."""
        self.num_places = ends[-1]
        self.has_failed = False
        """Whether any sequence of the batch has failed."""
        self._columns: _Columns | None = None
        self._one_each = None if any(self._drafts) else _Tokens.one_each(len(asked))
        """The new tokens where each sequence has one, filled anew in every step; None with drafts."""

    def masks(self, tried: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Masks uint32 [places, words]: bit t % 32 of word t // 32 is token t. And bool [places]: where one is filled.

        `tried`: a token for each place, int64, negative for none. Where it may come no mask is filled, and what is
        there means nothing: to ask for one token takes a fraction of the time. Masks of a sequence that has failed, and
        those behind its end, allow all; if no sequence has a grammar that compiled, there is none: [places, 0].
        """
        if tried is None:
            tried = np.full(self.num_places, -1)
        vocabulary, _, native = self._columns_now()
        if vocabulary is None:
            return np.empty((self.num_places, 0), np.uint32), np.zeros(self.num_places, np.bool_)
        tokens = self._tokens()
        if native is None:
            masks, is_filled, found = self._masks_in_python(vocabulary, *tokens, tried)
        else:
            masks, is_filled, found = native.fill(*tokens, tried, MAX_MASK_SECONDS)
        self._note(found, *tokens)
        return masks, is_filled

    def restrict(
        self,
        rows: PreparedRows,
        row_at: np.ndarray,
        tries_first: np.ndarray | None,
    ) -> bool:
        """Draw the rows again whose tokens may not come; see `kernels.cpu.grammar.Matchers.restrict`.

        Returns False, and has done nothing, where C++ does not follow these sequences.
        """
        native = self._columns_now().native
        if native is None:
            return False
        tokens = self._tokens()
        found = native.restrict(*tokens, rows, row_at, tries_first, MAX_MASK_SECONDS)
        self._note(found, *tokens)
        return True

    def _columns_now(self) -> "_Columns":
        """The columns, made again where a sequence has ended, or cannot go on."""
        if self._columns is None:
            for state in self._states:
                if state.vocabulary is None and state.failure is None:
                    state.begin()
                self.has_failed |= state.failure is not None
        matchers = [state.matcher for state in self._states]
        if self._columns is None or self._columns.matchers != matchers:
            self._columns = _Columns.of(self._states, matchers, [len(draft) for draft in self._drafts])
        return self._columns

    def _tokens(self) -> "_Tokens":
        """Tokens that are new to the matchers, which count as having taken them now, with drafts."""
        lengths, one_each = [len(token_ids) for token_ids in self._token_ids], self._one_each
        if one_each is not None and lengths == [state.num_followed + 1 for state in self._states]:
            found = one_each  # in nearly every step
            found.ids[:] = [token_ids[-1] for token_ids in self._token_ids]
        else:
            found = self._new_tokens()
        for state, length in zip(self._states, lengths, strict=True):
            state.num_followed = length
        return found

    def _new_tokens(self) -> "_Tokens":
        new: list[int] = []
        ends = []
        for state, token_ids, draft in zip(self._states, self._token_ids, self._drafts, strict=True):
            new += token_ids[state.num_followed :]
            new += draft
            ends.append(len(new))
        return _Tokens(np.array(new, np.uint32), np.array(ends, np.int64))

    def _note(self, found: Followed, tokens: np.ndarray, ends: np.ndarray) -> None:
        for row in found.outcomes.nonzero()[0].tolist():
            state, outcome = self._states[row], Outcome(int(found.outcomes[row]))
            if state.matcher is not None:
                place = int((ends[row - 1] if row else 0) + found.refused[row])
                token_id = int(tokens[place]) if outcome is Outcome.REFUSED else None
                state.note(outcome, token_id, float(found.seconds[row]))
                self.has_failed |= state.failure is not None

    def _masks_in_python(
        self, vocabulary: Vocabulary, tokens: np.ndarray, ends: np.ndarray, tried: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Followed]:
        masks = np.empty((self.num_places, vocabulary.num_words), np.uint32)
        is_filled, found, start = np.empty(self.num_places, np.bool_), Followed(len(ends)), 0
        for row, (state, draft) in enumerate(zip(self._states, self._drafts, strict=True)):
            new = tokens[start : ends[row] - len(draft)].tolist()
            own = slice(self.firsts[row], self.firsts[row] + 1 + len(draft))
            wanted = Wanted(vocabulary.plain, masks[own], tried[own], is_filled[own])
            outcome, found.refused[row], found.seconds[row] = follow(state, new, draft, wanted, MAX_MASK_SECONDS)
            if outcome is not Outcome.FOLLOWED:
                wanted.allow_all(0)
            found.outcomes[row], start = outcome, int(ends[row])
        return masks, is_filled, found


class _Tokens(NamedTuple):
    """Tokens of N sequences."""

    ids: np.ndarray
    """uint32, those of all sequences end to end."""
    ends: np.ndarray
    """int64 [N], where each sequence's tokens end."""

    @classmethod
    def one_each(cls, num_sequences: int) -> "_Tokens":
        """One token of each sequence, whose ids are yet to be set."""
        return cls(np.empty(num_sequences, np.uint32), np.arange(1, num_sequences + 1))


class _Columns(NamedTuple):
    """Vocabulary and matchers of N sequences, kept until one of them ends or fails."""

    vocabulary: Vocabulary | None
    """None where no grammar has compiled."""
    matchers: list[Any]
    """A sequence's matcher; None behind its end, and where it cannot go on."""
    native: Matchers | None
    """None where Python follows them."""

    @classmethod
    def of(cls, states: Sequence[GrammarState], matchers: list[Any], num_drafted: Sequence[int]) -> "_Columns":
        vocabulary = next((state.vocabulary for state in states if state.vocabulary is not None), None)
        if vocabulary is None or vocabulary.native is None:
            return cls(vocabulary, matchers, None)
        any_bits = vocabulary.bits(())
        bits = [any_bits if state.matcher is None else state.bits for state in states]
        addresses = np.array([0 if matcher is None else matcher.address for matcher in matchers], np.uint64)
        text, stops = ([b.text_address for b in bits], [b.stops_address for b in bits])
        native = Matchers(
            vocabulary.native.functions,
            addresses,
            (np.array(text, np.uint64), np.array(stops, np.uint64)),
            vocabulary.plain,
            num_drafted,
        )
        return cls(vocabulary, matchers, native)


def forbid(logits: Tensor, masks: np.ndarray) -> None:
    """Set the logits float32 [N, V] of tokens that the masks, uint32 [N, words], do not allow to -inf, in place."""
    forbidden = np.unpackbits(~masks.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
    logits.masked_fill_(torch.from_numpy(forbidden[:, : logits.shape[1]]), -torch.inf)
