"""Masks of the tokens that the grammars of many sequences allow next.

llguidance follows the grammars and fills masks, those of many sequences on threads of its own. No mask is filled for a
token that has been drawn and is allowed.
"""

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.grammars.state import GrammarState
from rollout_engine.grammars.vocabulary import executor_of

MAX_MASK_SECONDS = 0.5
"""Computing time of one mask, beyond which its sequence ends with an error."""
_LEAST_TOGETHER = 8
"""Masks below which other threads do not pay."""
_ALL = 0xFFFFFFFF
"""A word of a mask that allows all."""


class Asked(NamedTuple):
    """A sequence whose masks are asked for."""

    state: GrammarState
    token_ids: list[int]
    """Its tokens, prompt first; the list may grow between two calls of `GrammarBatch`."""
    draft: Sequence[int] = ()
    """Tokens that may follow; a mask is asked for behind each of them too."""


class GrammarBatch:
    """N sequences that are followed together, step after step; none is asked for the same twice.

    A *place* is the position behind some tokens: behind a sequence's own, and behind each token of its draft.
    The states record failures.
    """

    def __init__(self, asked: Sequence[Asked]) -> None:
        self._asked = asked
        ends = list(accumulate(1 + len(each.draft) for each in asked))
        self.firsts = [0, *ends[:-1]]
        """The place behind each sequence's own tokens; those behind the tokens of its draft follow."""
        self.num_places = ends[-1]
        self._has_begun = False

    @property
    def has_failed(self) -> bool:
        """Whether any sequence of the batch has failed."""
        return any(each.state.failure is not None for each in self._asked)

    def masks(self, tried: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Masks uint32 [places, words], bit t % 32 of word t // 32 is token t; bool [places]: whether one is filled.

        `tried`: a token for each place, int64, negative for none. If it is allowed, no mask is filled, and the words
        there mean nothing: to ask for one token takes a fraction of the time. Masks of a sequence that has failed, and
        those behind its end, allow all; if no sequence has a grammar that compiled, there is none: [places, 0].
        """
        if not self._has_begun:
            self._begin()
        tokens = [-1] * self.num_places if tried is None else tried.tolist()
        vocabulary = next((v for each in self._asked if (v := each.state.vocabulary) is not None), None)
        if vocabulary is None:
            return np.empty((self.num_places, 0), np.uint32), np.zeros(self.num_places, np.bool_)
        step = _Step(np.empty((self.num_places, vocabulary.num_words), np.uint32), tokens)
        later: list[tuple[GrammarState, int]] = []
        for (state, token_ids, draft), first in zip(self._asked, self.firsts, strict=True):
            start, state.num_followed = state.num_followed, len(token_ids)
            if not state.follow(token_ids[start:]):
                step.allow_all(range(first, first + 1 + len(draft)))
            elif draft:
                step.follow_draft(state, first, draft)
            elif step.must_fill(state, first):
                later.append((state, first))
        if later:
            step.fill_together(later)
        return step.masks, step.is_filled

    def _begin(self) -> None:
        self._has_begun = True
        for each in self._asked:
            if each.state.vocabulary is None and each.state.failure is None:
                each.state.begin()


class _Step:
    """The masks of one call of `GrammarBatch.masks`."""

    def __init__(self, masks: np.ndarray, tried: list[int]) -> None:
        self.masks, self._tried = masks, tried
        self._address, self._num_bytes = masks.ctypes.data, masks.shape[1] * masks.itemsize
        self.is_filled = np.zeros(len(tried), np.bool_)

    def allow_all(self, places: range) -> None:
        """Let masks allow all; no token that was tried there is refused."""
        for place in places:
            self.masks[place] = _ALL
            self.is_filled[place] = self._tried[place] < 0

    def must_fill(self, state: GrammarState, place: int) -> bool:
        """Whether the place needs a mask: no token is tried there, or it is not known to be allowed."""
        return self._tried[place] < 0 or not state.allows(self._tried[place])

    def follow_draft(self, state: GrammarState, first: int, draft: Sequence[int]) -> None:
        """Fill the masks at `first` and behind each drafted token that is allowed; the state stays at `first`."""
        num_taken = 0
        if self.must_fill(state, first):
            self._fill_alone(state, first)
        for token_id in draft:
            if state.matcher is None or not state.try_draft(token_id):
                break
            num_taken += 1
            if self.must_fill(state, first + num_taken):
                self._fill_alone(state, first + num_taken)
        # A draw behind a token that is not allowed is dropped.
        self.allow_all(range(first + 1 + num_taken, first + 1 + len(draft)))
        if state.matcher is not None:
            state.leave_draft(num_taken)
        if state.matcher is None:
            self.allow_all(range(first, first + 1 + len(draft)))

    def fill_together(self, wanted: list[tuple[GrammarState, int]]) -> None:
        """Fill the masks of several sequences at their places, many of them on several threads."""
        num_threads = torch.get_num_threads()
        if num_threads == 1 or len(wanted) < _LEAST_TOGETHER:
            for state, place in wanted:
                self._fill_alone(state, place)
            return
        running = [(state.matcher, place) for state, place in wanted if not state.matcher.is_stopped()]
        started = time.perf_counter()
        if running:
            executor = executor_of(num_threads)
            executor.unsafe_compute_mask_ptr(running, self._address, self._num_bytes, len(self.masks))
        is_slow = time.perf_counter() - started > MAX_MASK_SECONDS
        for state, place in wanted:
            if is_slow:  # compute each again, to find the one that is slow
                self._fill_alone(state, place)
            else:
                self._finish(state, place)

    def _fill_alone(self, state: GrammarState, place: int) -> None:
        started = time.thread_time()
        if not state.matcher.is_stopped():
            state.matcher.unsafe_compute_mask_ptr(self._address + place * self._num_bytes, self._num_bytes)
        self._finish(state, place)
        if (seconds := time.thread_time() - started) > MAX_MASK_SECONDS and state.matcher is not None:
            state.fail(f"the tokens that may come next took {seconds:.1f} s to find: give a simpler grammar")
            self.allow_all(range(place, place + 1))

    def _finish(self, state: GrammarState, place: int) -> None:
        mask, tried = self.masks[place], self._tried[place]
        state.finish_mask(mask)
        if state.matcher is None:
            self.allow_all(range(place, place + 1))
        else:
            self.is_filled[place] = tried < 0 or not int(mask[tried // 32]) >> tried % 32 & 1


def forbid(logits: Tensor, masks: np.ndarray) -> None:
    """Set the logits float32 [N, V] of tokens that the masks, uint32 [N, words], do not allow to -inf, in place."""
    forbidden = np.unpackbits(~masks.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
    logits.masked_fill_(torch.from_numpy(forbidden[:, : logits.shape[1]]), -torch.inf)
