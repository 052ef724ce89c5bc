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
        if self._failure is not None:
            return
        try:
            if self._matcher is None:
                vocabulary, self._matcher = self._grammar.start()
                self._bits = vocabulary.bits(self._stop_ids)
            self._follow(token_ids)
            self._masks, self._place = {(): self._compute()}, len(token_ids)
            if draft:
                self._fill_draft(draft)
        except GrammarError as problem:
            self._failure = str(problem)

    def _follow(self, token_ids: list[int]) -> None:
        for token_id in token_ids[self._num_followed :]:
            if token_id in self._stop_ids:
                self._has_ended = True
            elif not self._has_ended and not self._matcher.consume_token(token_id):
                raise GrammarError(f"token {token_id} is not allowed ({readable(self._matcher.get_error())})")
        self._num_followed = len(token_ids)

    def _fill_draft(self, draft: Sequence[int]) -> None:
        num_right, is_right = 0, not self._has_ended
        for end, token_id in enumerate(draft, 1):
            is_right = is_right and token_id not in self._stop_ids and self._matcher.try_consume_tokens([token_id]) == 1
            num_right += is_right  # what is drawn behind a token that cannot come is dropped
            self._masks[tuple(draft[:end])] = self._compute() if is_right else np.full_like(self._bits.text, _ALL)
        if num_right and not self._matcher.rollback(num_right):
            raise GrammarError(f"it cannot go back behind a draft ({readable(self._matcher.get_error())})")

    def _compute(self) -> np.ndarray:
        matcher, bits = self._matcher, self._bits
        if self._has_ended:  # the row is dropped
            return np.full_like(bits.text, _ALL)
        mask = np.zeros_like(bits.text)
        start = time.thread_time()
        if not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(mask.__array_interface__["data"][0], mask.nbytes)
        if matcher.is_error():
            raise GrammarError(readable(matcher.get_error()))
        if (seconds := time.thread_time() - start) > _MAX_MASK_SECONDS:
            raise GrammarError(f"the tokens that may come next took {seconds:.1f} s to find: give a simpler grammar")
        mask &= bits.text
        if matcher.is_accepting():
            mask |= bits.stops
        return mask


def begin_masks(thread: DaemonThread, asked: Iterable[tuple[GrammarState, list[int], list[int]]]) -> None:
    """Fill the masks of states on a thread; of each its sequence's tokens, and the draft behind them."""
    done, work = threading.Event(), list(asked)
    if not work:
        return
    for state, _, _ in work:
        state.wait_for(done)

    def fill() -> None:
        try:
            for state, token_ids, draft in work:
                state.fill(token_ids, draft)
        finally:
            done.set()

    thread.submit(fill)


def forbid(logits: Tensor, masks: Sequence[np.ndarray]) -> None:
    """Set the logits float32 [N, V] of tokens that the N masks do not allow to -inf, in place."""
    forbidden = np.unpackbits(~np.stack(masks).view(np.uint8), axis=1, bitorder="little").view(np.bool_)
    logits.masked_fill_(torch.from_numpy(forbidden[:, : logits.shape[1]]), -torch.inf)
