"""Bootstrap intervals over prompts, and paired differences with p-values.

The unit is the prompt: samples of one prompt are not independent, so prompts are drawn again, with all their samples.
Draws have a fixed seed: the same results give the same interval.
"""

import functools
import itertools
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
NUM_RESAMPLES = 4000
_NUM_FLIPS = 10_000
_MOST_EXACT = 13
"""Differences other than 0 up to which all 2**n assignments of signs are tried."""
_CHUNK = 1 << 22
"""Draws at once."""


class Estimate(NamedTuple):
    """A mean over prompts and its interval; the ends are None with fewer than two prompts."""

    value: float
    low: float | None
    high: float | None


class Difference(NamedTuple):
    """Mean over prompts of b - a, its interval, and the probability of one as large if a and b were exchangeable."""

    value: float
    low: float | None
    high: float | None
    p_value: float | None


def mean_interval(
    values: np.ndarray, *, confidence: float = CONFIDENCE, num_resamples: int = NUM_RESAMPLES
) -> Estimate:
    """Mean of `values`, float [prompts], with the percentile bootstrap interval (Efron, 1979) of `confidence`."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, None, None)
    apart = np.asarray(values, np.float64) - values[0]  # so that equal values have an interval of no width
    means = values[0] + np.concatenate([times @ apart for times in _redraws(len(values), num_resamples)]) / len(values)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(mean, float(low), float(high))


@functools.lru_cache(maxsize=1)
def _redraws(count: int, num_resamples: int) -> list[np.ndarray]:
    """How often each of `count` prompts is drawn, uint16 [resamples, count] in parts, the same for all values."""
    generator, rows = np.random.default_rng(0), max(1, _CHUNK // count)
    parts = []
    for start in range(0, num_resamples, rows):
        drawn = generator.integers(0, count, (min(rows, num_resamples - start), count))
        drawn += np.arange(len(drawn))[:, None] * count
        parts.append(np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape).astype(np.uint16))
    return parts


def paired_difference(a: np.ndarray, b: np.ndarray) -> Difference:
    """Compare two results on the same prompts, float [prompts] each, in the same order.

    The p-value is two-sided, of the permutation test that flips the signs of differences (Fisher, 1935): over all
    assignments of signs if few prompts differ, else over 10,000 random ones, (1 + as large) / (1 + 10,000).
    """
    differences = np.asarray(b, np.float64) - np.asarray(a, np.float64)
    estimate = mean_interval(differences)
    return Difference(*estimate, None if len(differences) < 2 else _p_value(differences[differences != 0]))


def _p_value(differences: np.ndarray) -> float:
    """`differences`: those that are not 0; a sign changes nothing of the others."""
    count = len(differences)
    least = abs(differences.sum()) * (1 - 1e-9) - 1e-12
    if count <= _MOST_EXACT:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=count))).reshape(2**count, count)
        return float((np.abs(signs @ differences) >= least).mean())
    generator, rows, as_large = np.random.default_rng(0), max(1, _CHUNK // count), 0
    for start in range(0, _NUM_FLIPS, rows):
        shape = min(rows, _NUM_FLIPS - start), -(-count // 8)
        flips = np.unpackbits(generator.integers(0, 256, shape, np.uint8), axis=1, count=count)
        as_large += int((np.abs(2 * (flips @ differences) - differences.sum()) >= least).sum())
    return (1 + as_large) / (1 + _NUM_FLIPS)
