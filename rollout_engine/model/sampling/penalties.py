"""Repetition, presence and frequency penalties.

    seen in prompt or output   x -> x / repetition if x > 0, else x * repetition
    seen in the output         x -> x - frequency * (times in the output) - presence

All in float32, in this order. Penalties depend on a sequence's tokens alone, so forked, preempted and replayed
sequences are penalised alike.
"""

from collections import ChainMap
from collections.abc import MutableMapping, Sequence
from copy import copy

import numpy as np

from rollout_engine.base.sampling_params import SamplingParams, penalties_of


class TokenCounts:
    """The distinct tokens of one sequence, and how often each occurs in its output; grows with the sequence."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        ids = np.unique(np.array(prompt_token_ids, np.int64))
        self._ids = ids
        self._counts = np.zeros(len(ids), np.float32)
        self._size = len(ids)
        self._place: MutableMapping[int, int] = {token: i for i, token in enumerate(ids.tolist())}
        self._num_followed = len(prompt_token_ids)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Count the tokens appended to `token_ids`, prompt included, since the last call."""
        self._count(token_ids[self._num_followed :])

    def behind(self, token_ids: Sequence[int]) -> "TokenCounts":
        """The counts behind some more tokens. These here stay as they are, and must do so while the others are used."""
        made = copy(self)
        made._ids, made._counts, made._place = self._ids.copy(), self._counts.copy(), ChainMap({}, self._place)
        made._count(token_ids)
        return made

    @property
    def ids(self) -> np.ndarray:
        """Distinct token ids, int64 [U], in order of first occurrence."""
        return self._ids[: self._size]

    @property
    def counts(self) -> np.ndarray:
        """How often each occurs in the output, float32 [U]."""
        return self._counts[: self._size]

    def _count(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            place = self._place.setdefault(token, self._size)
            if place == self._size:
                self._append(token)
            self._counts[place] += 1
        self._num_followed += len(token_ids)

    def _append(self, token: int) -> None:
        if self._size == len(self._ids):
            room = max(16, self._size)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._ids[self._size] = token
        self._size += 1


def penalise(logits: np.ndarray, counts: TokenCounts, params: SamplingParams) -> None:
    """Penalise one row of logits, float32 [V], in place."""
    repetition, frequency, presence = map(np.float32, penalties_of(params))
    x, times = logits[counts.ids], counts.counts
    if repetition != 1:
        x = np.where(x > 0, x / repetition, x * repetition)
    if frequency or presence:
        x = x - frequency * times - presence * (times > 0)
    logits[counts.ids] = x
