"""Every choice of a simulated run, drawn from one seed."""

import random
from collections.abc import Sequence
from typing import TypeVar

Option = TypeVar("Option")


class Choices:
    """Draws choices from a seed; after the first `limit` of them it takes the plain one: the first option, no chance.

    So a run is a seed and a limit, and a smaller limit is a simpler run: fewer operations, faults and switches.
    """

    def __init__(self, seed: int, limit: int | None = None) -> None:
        self._random = random.Random(seed)
        self._limit = 1 << 62 if limit is None else limit
        self.num_made = 0

    @property
    def are_over(self) -> bool:
        """Whether only plain choices are left."""
        return self.num_made >= self._limit

    def below(self, stop: int) -> int:
        """A number in [0, stop); 0 is the plain one."""
        self.num_made += 1
        return 0 if stop < 2 or self.num_made > self._limit else int(self._random.random() * stop)

    def pick(self, options: Sequence[Option]) -> Option:
        """One of the options; the first is the plain one."""
        return options[self.below(len(options))]

    def chance(self, probability: float) -> bool:
        """True with this probability; False is the plain choice."""
        self.num_made += 1
        return self.num_made <= self._limit and self._random.random() < probability
