"""The protocol by which engines that divide a mixture's experts step together: a state machine over shared numbers.

    LOADING ── open(key) ──> OPEN ── ask_to_close ──> CLOSING ── try_close ──> CLOSED
                              ^                                                  │ the weights change, or sleep
                              └──────────────────── open(key) ───────────────────┘

A forward is a round: every engine takes part in every round, with its own tokens or, as a dummy, with none. Rounds
follow one another in a wave, which lasts while any engine has work. Two rules keep it free of deadlocks, and of rows of
one version that meet experts of another:

    hold    An engine holds the group while it computes a step. It may hold only if all engines are OPEN with the same
            key, which stands for their weights. Only an engine that holds begins a round.
    owe     An engine that has not taken part in a round that another has begun owes it, and pays whatever else it
            waits for. It is CLOSED only once no other engine holds and it owes nothing.

So a round that has begun meets open engines of one key, and ends; an engine that wants to change its weights waits
for steps alone, which end; and no engine waits for the group while it holds. Each method is atomic: `exclusive` shuts
out the other engines, and the other threads of this one.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import IntEnum

import numpy as np


class Stage(IntEnum):
    """Whether an engine's experts may be computed with."""

    LOADING = 0
    OPEN = 1
    CLOSING = 2
    """It wants to be CLOSED: no other engine begins to hold, unless it ends work that it has begun."""
    CLOSED = 3
    LEFT = 4
    """It ends, and takes part in nothing more."""


class Field(IntEnum):
    """Rows of the shared numbers, each of which has one for every engine."""

    STAGE = 0
    KEY = 1
    """A number for the live weights: equal exactly if these are."""
    HOLDS = 2
    JOINED = 3
    """Rounds that it has taken part in, or takes part in now."""
    WORK = 4
    """Whether it has requests that steps would compute."""
    NUM_OWN = 5
    """Rounds that it has joined with tokens of its own."""
    PROCESS = 6
    """Its process id."""
    BROKEN = 7
    """Whether it has ended, or failed in a round."""


NUM_FIELDS = len(Field)


class Waves:
    """One engine's view of the group.

    Args:
        numbers: int64 [NUM_FIELDS, number of engines], zeros at first, which all engines share.
        rank: this engine's place in the group.
        exclusive: makes the context manager inside which no other engine or thread reads or writes `numbers`.
    """

    def __init__(self, numbers: np.ndarray, rank: int, exclusive: Callable[[], AbstractContextManager[object]]) -> None:
        self._numbers, self.rank, self._exclusive = numbers, rank, exclusive
        self.size = numbers.shape[1]

    def open(self, key: int) -> None:
        """Take part in rounds from now on, with the weights that `key` stands for."""
        with self._exclusive():
            self._set(Field.KEY, key)
            if self._get(Field.STAGE) == Stage.LOADING:  # rounds of before it are none of its own
                self._set(Field.JOINED, self._num_begun())
            self._set(Field.STAGE, Stage.OPEN)

    def try_hold(self) -> bool:
        """Hold the group, if all engines are open with one key. An engine that holds already continues to."""
        with self._exclusive():
            if not self._get(Field.HOLDS) and self._is_ready():
                self._set(Field.HOLDS, 1)
            return bool(self._get(Field.HOLDS))

    def release(self) -> None:
        """Hold no longer; a no-op without a hold. No round of this engine's own may be in progress."""
        with self._exclusive():
            self._set(Field.HOLDS, 0)

    def begin_round(self) -> int:
        """Join the next round, with tokens; returns its number, from 1. Raises `AssertionError` without a hold."""
        with self._exclusive():
            assert self._get(Field.HOLDS), "an engine that does not hold begins no round"
            self._set(Field.NUM_OWN, self._get(Field.NUM_OWN) + 1)
            return self._join()

    def join_owed(self) -> int:
        """Join the oldest round that is owed, as a dummy; returns its number, or 0 if none is owed."""
        with self._exclusive():
            return self._join() if self._owes() else 0

    @property
    def owes(self) -> bool:
        """Whether another engine has begun a round that this one has not joined."""
        with self._exclusive():
            return self._owes()

    def ask_to_close(self) -> None:
        """Let no other engine begin to hold, and hold no longer. A no-op while closed."""
        with self._exclusive():
            self._set(Field.HOLDS, 0)
            if self._get(Field.STAGE) == Stage.OPEN:
                self._set(Field.STAGE, Stage.CLOSING)

    def try_close(self, *, politely: bool = False) -> bool:
        """Take part in no more rounds, once no other engine holds and none is owed. Returns whether that is so now.

        `politely`: only once no other open engine with these weights has work either. Until then others may hold.
        """
        with self._exclusive():
            if self._get(Field.STAGE) not in (Stage.OPEN, Stage.CLOSING):
                return True
            others = [rank for rank in range(self.size) if rank != self.rank]
            in_use = any(self._numbers[Field.HOLDS, rank] for rank in others) or self._owes()
            stages, work, keys = (self._numbers[field] for field in (Field.STAGE, Field.WORK, Field.KEY))
            needs_it = (stages == Stage.OPEN) & (work != 0) & (keys == keys[self.rank])
            if politely and any(needs_it[rank] for rank in others):
                self._set(Field.STAGE, Stage.OPEN)
                in_use = True
            elif not in_use:
                self._set(Field.STAGE, Stage.CLOSED)
            else:
                self._set(Field.STAGE, Stage.CLOSING)
            return not in_use

    def leave(self) -> None:
        """Note that this engine ends in order. The group computes no more."""
        with self._exclusive():
            self._set(Field.HOLDS, 0)
            self._set(Field.WORK, 0)
            self._set(Field.STAGE, Stage.LEFT)

    def set_work(self, has_work: bool) -> None:
        """Note whether this engine has requests to compute: the wave lasts while one has."""
        if bool(self._numbers[Field.WORK, self.rank]) != has_work:
            with self._exclusive():
                self._set(Field.WORK, int(has_work))

    @property
    def is_ready(self) -> bool:
        """Whether all engines are open with one key."""
        with self._exclusive():
            return self._is_ready()

    @property
    def num_dummies(self) -> int:
        """Rounds that this engine has joined without tokens."""
        with self._exclusive():
            return int(self._numbers[Field.JOINED, self.rank] - self._numbers[Field.NUM_OWN, self.rank])

    def describe(self) -> str:
        """Describe for messages why the group is not ready."""
        stages = [Stage(int(each)).name.lower() for each in self._numbers[Field.STAGE]]
        keys = {int(key) for key in self._numbers[Field.KEY]}
        return f"its engines are {', '.join(stages)}{'' if len(keys) == 1 else ' and have different weights'}"

    def _is_ready(self) -> bool:
        keys = self._numbers[Field.KEY]
        return bool((self._numbers[Field.STAGE] == Stage.OPEN).all() and (keys == keys[0]).all())

    def _owes(self) -> bool:
        return self._get(Field.JOINED) < self._num_begun()

    def _join(self) -> int:
        number = self._get(Field.JOINED) + 1
        self._set(Field.JOINED, number)
        return number

    def _num_begun(self) -> int:
        return int(self._numbers[Field.JOINED].max())

    def _get(self, field: Field) -> int:
        return int(self._numbers[field, self.rank])

    def _set(self, field: Field, value: int) -> None:
        self._numbers[field, self.rank] = value
