"""Masks of the tokens that the grammar of a sequence allows next, computed beside the step that they are for.

begin_masks    a thread follows the sequences' tokens and fills masks, while the model computes
masks_of       waits for them; computes what nobody asked for ahead
"""

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout_engine.grammars.compiler import DaemonThread, Grammar
from rollout_engine.grammars.vocabulary import GrammarError, MaskBits, Vocabulary, readable

_MAX_MASK_SECONDS = 0.5
"""Computing time of one mask, beyond which its sequence ends with an error."""
_SLOW_SECONDS = 0.1
"""A call that takes longer has the next masks of its states computed one by one, each with its time taken."""
_ALL = 0xFFFFFFFF
"""Word of a mask that allows all."""


class GrammarState:
    """Where one sequence stands in its grammar, which is a function of its tokens.

    A token that ends the sequence is allowed exactly where the tokens before it are complete.
    """

    def __init__(self, grammar: Grammar, num_prompt_tokens: int, stop_ids: Sequence[int]) -> None:
        self._grammar = grammar
        self._stop_ids = tuple(stop_ids)
        self._matcher: Any = None
        """None before the first mask."""
        self._vocabulary: Vocabulary
        self._bits: MaskBits
        self._is_timed = False
        self._num_followed = num_prompt_tokens
        self._has_ended = False
        self._failure: str | None = None
        self._place = -1
        """Length of the sequence that `_masks` are for."""
        self._masks: dict[tuple[int, ...], np.ndarray] = {}
        """Masks by the drafted tokens behind the sequence."""
        self._ahead: threading.Event | None = None
        """Set once the masks are there that `begin_masks` was asked for."""

    def mask(self, token_ids: list[int], draft: Sequence[int] = ()) -> np.ndarray:
        """Bits uint32 [words] of the tokens allowed behind a sequence's tokens and a draft. Raises `GrammarError`."""
        if self._ahead is not None:
            if not self._ahead.is_set():
                self._ahead.wait()
            self._ahead = None
        key = tuple(draft)
        if self._failure is None and (self._place != len(token_ids) or key not in self._masks):
            self.fill(token_ids, draft)
        if self._failure is not None:
            raise GrammarError(self._failure)
        return self._masks[key]

    def wait_for(self, ahead: threading.Event) -> None:
        """From now on `mask` waits for this event first."""
        self._ahead = ahead

    def fill(self, token_ids: list[int], draft: Sequence[int] = ()) -> None:
        """Compute the masks behind a sequence's tokens and behind each token of a draft. Notes what fails."""
        _fill_together([(self, token_ids)])
        if draft and self._failure is None:
            try:
                self._fill_draft(draft)
            except GrammarError as problem:
                self._failure = str(problem)

    def _begin(self, token_ids: list[int]) -> list[int]:
        """Tokens that the matcher has to take yet; from now on they count as taken. Raises `GrammarError`."""
        if self._matcher is None:
            self._vocabulary, self._matcher = self._grammar.start()
            self._bits = self._vocabulary.bits(self._stop_ids)
        new = [] if self._has_ended else token_ids[self._num_followed :]
        self._num_followed = len(token_ids)
        for place, token_id in enumerate(new):
            if token_id in self._stop_ids:
                self._has_ended = True
                return new[:place]
        return new

    def _refuse(self, token_id: int) -> None:
        self._failure = f"token {token_id} is not allowed ({readable(self._matcher.get_error())})"

    def _keep(self, mask: np.ndarray) -> None:
        self._masks, self._place = {(): mask}, self._num_followed

    def _fill_draft(self, draft: Sequence[int]) -> None:
        num_right, is_right = 0, not self._has_ended
        for end, token_id in enumerate(draft, 1):
            is_right = is_right and token_id not in self._stop_ids and self._matcher.try_consume_tokens([token_id]) == 1
            num_right += is_right  # what is drawn behind a token that cannot come is dropped
            if is_right:
                [mask] = _masks_of([self])
                if self._failure is not None:
                    return
            else:
                mask = np.full_like(self._bits.text, _ALL)
            self._masks[tuple(draft[:end])] = mask
        if num_right and not self._matcher.rollback(num_right):
            raise GrammarError(f"it cannot go back behind a draft ({readable(self._matcher.get_error())})")


def _fill_together(asked: Iterable[tuple[GrammarState, list[int]]]) -> None:
    """Compute the masks behind the tokens of sequences. Notes what fails."""
    states = _followed(asked)
    for state, mask in zip(states, _masks_of(states) if states else (), strict=True):
        state._keep(mask)


def _followed(asked: Iterable[tuple[GrammarState, list[int]]]) -> list[GrammarState]:
    """Go on to the last of the sequences' tokens; the states where a mask can be computed. Notes what fails."""
    going_on: list[tuple[GrammarState, list[int]]] = []
    for state, token_ids in asked:
        if state._failure is None:
            try:
                going_on.append((state, state._begin(token_ids)))
            except GrammarError as problem:
                state._failure = str(problem)
    # All take their first token, then their second ...: nearly always they have one each.
    for place in range(max((len(new) for _, new in going_on), default=0)):
        taking = [(state, new[place]) for state, new in going_on if place < len(new) and state._failure is None]
        executor = taking[0][0]._vocabulary.executor
        taken = executor.consume_token_par([(state._matcher, token_id) for state, token_id in taking])
        for (state, token_id), is_taken in zip(taking, taken, strict=True):
            if not is_taken:
                state._refuse(token_id)
    for state, _ in going_on:
        if state._has_ended and state._failure is None:  # the row is dropped
            state._keep(np.full_like(state._bits.text, _ALL))
    return [state for state, _ in going_on if state._failure is None and not state._has_ended]


def _masks_of(states: Sequence[GrammarState]) -> np.ndarray:
    """Masks uint32 [N, words] of N states where their matchers stand. Notes what fails."""
    masks = np.zeros((len(states), len(states[0]._bits.text)), np.uint32)
    _compute(states, masks)
    for bits in {id(state._bits): state._bits for state in states}.values():  # one, but for requests with stop ids
        rows = [row for row, state in enumerate(states) if state._bits is bits]
        ends = [row for row in rows if states[row]._matcher.is_accepting()]
        if len(rows) == len(states):
            masks &= bits.text
        else:
            masks[rows] &= bits.text
        if ends:
            masks[ends] |= bits.stops
    return masks


def _compute(states: Sequence[GrammarState], masks: np.ndarray) -> None:
    """Fill the masks with llguidance's; all in one call, but for states that were among slow ones. Notes what fails."""
    place, size = masks.ctypes.data, masks.strides[0]
    together = []
    for row, state in enumerate(states):
        if state._matcher.is_stopped():
            continue
        if not state._is_timed:
            together.append((state._matcher, row))
            continue
        start = time.thread_time()
        state._matcher.unsafe_compute_mask_ptr(place + row * size, size)
        seconds = time.thread_time() - start
        state._is_timed = seconds > _SLOW_SECONDS
        if seconds > _MAX_MASK_SECONDS:
            state._failure = f"the tokens that may come next took {seconds:.1f} s to find: give a simpler grammar"
    if together:
        start = time.perf_counter()
        states[0]._vocabulary.executor.unsafe_compute_mask_ptr(together, place, size, len(states))
        if time.perf_counter() - start > _SLOW_SECONDS:
            for _, row in together:
                states[row]._is_timed = True
    for state in states:
        if state._failure is None and state._matcher.is_error():
            state._failure = readable(state._matcher.get_error())


def begin_masks(thread: DaemonThread, asked: Iterable[tuple[GrammarState, list[int], list[int]]]) -> None:
    """Fill the masks of states on a thread; of each its sequence's tokens, and the draft behind them."""
    done, work = threading.Event(), list(asked)
    if not work:
        return
    for state, _, _ in work:
        state.wait_for(done)

    def fill() -> None:
        try:
            _fill_together((state, token_ids) for state, token_ids, draft in work if not draft)
            for state, token_ids, draft in work:
                if draft:
                    state.fill(token_ids, draft)
        finally:
            done.set()

    thread.submit(fill)


def forbid(logits: Tensor, masks: Sequence[np.ndarray]) -> None:
    """Set the logits float32 [N, V] of tokens that the N masks do not allow to -inf, in place."""
    forbidden = np.unpackbits(~np.stack(masks).view(np.uint8), axis=1, bitorder="little").view(np.bool_)
    logits.masked_fill_(torch.from_numpy(forbidden[:, : logits.shape[1]]), -torch.inf)
