"""Draws lengths of prompts and outputs."""

import math
import random

from rollout_engine.capacity.options import Lengths

_Z95 = 1.6448536269514722
"""The 95th percentile of the standard normal distribution."""


class LengthSampler:
    """Draws from `Lengths`; lengths of one group are alike to the degree `correlation`."""

    def __init__(self, lengths: Lengths, source: random.Random, correlation: float = 0.0) -> None:
        self._lengths, self._random = lengths, source
        self._location = math.log(lengths.median)
        self._scale = math.log(lengths.p95 / lengths.median) / _Z95
        self._of_group, self._of_sample = math.sqrt(correlation), math.sqrt(1 - correlation)
        self._values = sorted(lengths.values)

    def draw_group(self, count: int) -> list[int]:
        """The lengths of one group's samples."""
        gauss = self._random.gauss
        common = self._of_group * gauss(0.0, 1.0)
        return [self._length(common + self._of_sample * gauss(0.0, 1.0)) for _ in range(count)]

    def draw(self) -> int:
        """One length."""
        return self._length(self._random.gauss(0.0, 1.0))

    def _length(self, deviation: float) -> int:
        if self._values:  # the value at the quantile of the deviation, so that correlation holds for these too
            quantile = 0.5 * (1 + math.erf(deviation / math.sqrt(2)))
            return self._values[min(int(quantile * len(self._values)), len(self._values) - 1)]
        length = round(math.exp(self._location + self._scale * deviation))
        return min(max(length, self._lengths.least), self._lengths.most)
