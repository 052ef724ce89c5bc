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
from rollout_engine.grammars.vocabulary import GrammarError, MaskBits, readable

_MAX_MASK_SECONDS = 0.5
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
        self._matcher: Any = None
        """None before the first mask."""
        self._bits: MaskBits
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

    def _follow(self, token_ids: list[int]) -> bool:
        """Go on to the last of a sequence's tokens; whether a mask can be computed there. Notes what fails."""
        if self._failure is not None:
            return False
        try:
            if self._matcher is None:
                vocabulary, self._matcher = self._grammar.start()
                self._bits = vocabulary.bits(self._stop_ids)
            for token_id in token_ids[self._num_followed :]:
                if token_id in self._stop_ids:
                    self._has_ended = True
                elif not self._has_ended and not self._matcher.consume_token(token_id):
                    raise GrammarError(f"token {token_id} is not allowed ({readable(self._matcher.get_error())})")
        except GrammarError as problem:
            self._failure = str(problem)
            return False
        self._num_followed = len(token_ids)
        if self._has_ended:  # the row is dropped
            self._keep(np.full_like(self._bits.text, _ALL))
        return not self._has_ended

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
    states = [state for state, token_ids in asked if state._follow(token_ids)]
    for state, mask in zip(states, _masks_of(states) if states else (), strict=True):
        state._keep(mask)


def _masks_of(states: Sequence[GrammarState]) -> np.ndarray:
    """Masks uint32 [N, words] of N states where their matchers stand. Notes what fails."""
    masks = np.zeros((len(states), len(states[0]._bits.text)), np.uint32)
    place, size, clock = masks.ctypes.data, masks.strides[0], _MaskClock()
    for state in states:
        if not state._matcher.is_stopped():
            state._matcher.unsafe_compute_mask_ptr(place, size)
        place += size
        seconds = clock.seconds()
        if state._matcher.is_error():
            state._failure = readable(state._matcher.get_error())
        elif seconds > _MAX_MASK_SECONDS:
            state._failure = f"the tokens that may come next took {seconds:.1f} s to find: give a simpler grammar"
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


class _MaskClock:
    """Computing time of one mask after the other, up to 0.1 s of those before it included.

    The system's clock of a thread's computing is slow to read, so it is read where a tenth of a second has passed.
    """

    def __init__(self) -> None:
        self._wall, self._computed = time.perf_counter(), time.thread_time()

    def seconds(self) -> float:
        """Computing time since the last one that was told, or since the start."""
        wall = time.perf_counter()
        if wall - self._wall < 0.1:
            return 0.0
        before, self._computed, self._wall = self._computed, time.thread_time(), wall
        return self._computed - before


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
