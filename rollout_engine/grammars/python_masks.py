"""Masks of one sequence by llguidance's Python objects: the twin of `kernels/cpu/grammar.h`."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rollout_engine.grammars.state import GrammarState
from rollout_engine.kernels.cpu.grammar import Outcome

ALL = 0xFFFFFFFF
"""Word of a mask that allows all."""


class Wanted(NamedTuple):
    """The masks that one sequence asks for, as `kernels.cpu.grammar.Matchers.fill` has those of all."""

    plain: np.ndarray
    masks: np.ndarray
    tried: np.ndarray
    is_filled: np.ndarray

    def allow_all(self, place: int) -> None:
        """Let the masks from `place` on allow all; nothing that was tried there is refused."""
        self.masks[place:], self.is_filled[place:] = ALL, self.tried[place:] < 0


def follow(
    state: GrammarState, new: list[int], draft: Sequence[int], wanted: Wanted, max_seconds: float
) -> tuple[Outcome, int, float]:
    """Fill one sequence's masks. Returns the outcome, the refused token's place, and the slowest mask's seconds."""
    if state.matcher is None:
        return Outcome.ENDED, 0, 0.0
    for place, token_id in enumerate(new):
        if state.ends_with(token_id):
            return Outcome.ENDED, 0, 0.0
        if not state.matcher.consume_token(token_id):
            return Outcome.REFUSED, place, 0.0
    outcome, slowest = _fill_one(state, wanted, 0, max_seconds)
    num_right = 0
    for token_id in draft:
        if outcome is not Outcome.FOLLOWED or state.ends_with(token_id):
            break
        if state.matcher.try_consume_tokens([token_id]) != 1:
            break
        num_right += 1
        outcome, seconds = _fill_one(state, wanted, num_right, max_seconds)
        slowest = max(slowest, seconds)
    wanted.allow_all(num_right + 1)  # what is drawn behind a token that cannot come is dropped
    if outcome is Outcome.FOLLOWED and num_right and not state.matcher.rollback(num_right):
        outcome = Outcome.STUCK
    return outcome, 0, slowest


def _fill_one(state: GrammarState, wanted: Wanted, place: int, max_seconds: float) -> tuple[Outcome, float]:
    """Fill the mask at `place`, where the matcher stands, unless the token tried there is allowed."""
    start, tried = time.thread_time(), int(wanted.tried[place])
    is_allowed = tried >= 0 and _allows(state, wanted.plain, tried)
    if not is_allowed:
        _fill_mask(state, mask := wanted.masks[place])
        is_allowed = tried >= 0 and _has(mask, tried)
    wanted.is_filled[place] = not is_allowed
    seconds = time.thread_time() - start
    if state.matcher.is_error():
        return Outcome.FAILED, seconds
    return Outcome.SLOW if seconds > max_seconds else Outcome.FOLLOWED, seconds


def _allows(state: GrammarState, plain: np.ndarray, token_id: int) -> bool:
    """Whether the mask has the token, or False where that cannot be told without it."""
    if state.ends_with(token_id):
        return bool(state.matcher.is_accepting())
    if not _has(state.bits.text, token_id) or not _has(plain, token_id) or state.matcher.is_stopped():
        return False
    return bool(state.matcher.validate_tokens([token_id]) == 1)


def _has(mask: np.ndarray, token_id: int) -> bool:
    return bool(int(mask[token_id // 32]) >> token_id % 32 & 1)


def _fill_mask(state: GrammarState, mask: np.ndarray) -> None:
    """Fill a mask, uint32 [words]."""
    if state.matcher.is_stopped():
        mask.fill(0)
    else:
        state.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    mask &= state.bits.text
    if state.matcher.is_accepting():
        mask |= state.bits.stops
