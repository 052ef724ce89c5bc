"""A run of alike steps, in which each sequence decodes and its context grows by a token."""

import math


class StepRun:
    """Steps that take `first` seconds, `first + growth`, `first + 2 x growth`, and so on."""

    __slots__ = ("first", "growth", "num_steps")

    def __init__(self, num_steps: int, first: float, growth: float) -> None:
        self.num_steps, self.first, self.growth = num_steps, first, growth

    def seconds_of(self, num_steps: int) -> float:
        """Seconds of the first `num_steps`."""
        return num_steps * self.first + self.growth * (num_steps * (num_steps - 1) / 2)

    def num_over(self, seconds: float) -> int:
        """Steps that are over after `seconds`."""
        if self.growth > 0:
            half = self.first / self.growth - 0.5
            guess = math.sqrt(half * half + 2 * seconds / self.growth) - half
        else:
            guess = seconds / self.first
        found = max(min(int(guess), self.num_steps), 0)
        while found < self.num_steps and self.seconds_of(found + 1) <= seconds:
            found += 1
        while found and self.seconds_of(found) > seconds:
            found -= 1
        return found

    def num_begun(self, seconds: float) -> int:
        """Steps that have begun after `seconds`, at least one: the point at which an outside event takes effect."""
        return min(self.num_over(seconds) + 1, self.num_steps)
