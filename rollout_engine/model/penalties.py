"""Repetition, presence and frequency penalties.

    seen in prompt or output   x -> x / repetition where x > 0, else x * repetition
    seen in the output         x -> x - frequency * (times in the output) - presence

All in float32, in this order. What a sequence has seen depends on its tokens alone, so a forked, preempted or replayed
sequence is penalised alike.
"""

from collections.abc import Sequence

import numpy as np

from rollout_engine.sampling_params import SamplingParams


class TokenCounts:
    """The distinct tokens of one sequence, and how often each occurs in its output; grows with the sequence."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        ids = np.unique(np.array(prompt_token_ids, np.int64))
        self._ids = ids
        self._counts = np.zeros(len(ids), np.float32)
        self._size = len(ids)
        self._place = {token: i for i, token in enumerate(ids.tolist())}
        self._num_followed = len(prompt_token_ids)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Count what `token_ids`, prompt included, has gained since the last call."""
        for token in token_ids[self._num_followed :]:
            place = self._place.setdefault(token, self._size)
            if place == self._size:
                self._append(token)
            self._counts[place] += 1
        self._num_followed = len(token_ids)

    @property
    def ids(self) -> np.ndarray:
        """int64 [U], distinct, in the order in which they were met."""
        return self._ids[: self._size]

    @property
    def counts(self) -> np.ndarray:
        """float32 [U], times in the output."""
        return self._counts[: self._size]

    def _append(self, token: int) -> None:
        if self._size == len(self._ids):
            room = max(16, self._size)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._ids[self._size] = token
        self._size += 1


def penalise(logits: np.ndarray, rows: list[int], counts: list[TokenCounts], params: list[SamplingParams]) -> None:
    """Penalise `rows` of `logits` float32 [N, V] in place, each by its own counts and params."""
    sizes = [len(each.ids) for each in counts]
    repetition, frequency, presence = (
        np.repeat(np.array(column, np.float32), sizes)
        for column in zip(
            *((p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params), strict=True
        )
    )
    where = np.repeat(np.array(rows), sizes), np.concatenate([each.ids for each in counts])
    times = np.concatenate([each.counts for each in counts])
    x = logits[where]
    x = np.where(x > 0, x / repetition, x * repetition)
    logits[where] = x - frequency * times - np.where(times > 0, presence, 0)
