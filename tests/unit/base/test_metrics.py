import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_engine.base.metrics import Histogram

BOUNDS = (1.0, 2.0, 4.0)


def test_a_value_on_a_bound_falls_below_it():
    histogram = Histogram.over(BOUNDS)
    for value in (0.5, 1.0, 1.5, 4.0, 4.1):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1, 1]
    assert histogram.sum == pytest.approx(11.1)
    assert histogram.mean == pytest.approx(11.1 / 5)


def test_an_empty_histogram_has_figures_too():
    histogram = Histogram.over(BOUNDS)
    assert (histogram.count, histogram.mean, histogram.quantile(0.5)) == (0, 0.0, 0.0)


@given(st.lists(st.floats(0, 8), min_size=1, max_size=40), st.floats(0.01, 1))
def test_quantiles_are_the_bound_above_the_true_one(values, q):
    histogram = Histogram.over(BOUNDS)
    for value in values:
        histogram.observe(value)
    true = sorted(values)[math.ceil(q * len(values)) - 1]
    assert histogram.quantile(q) == min((b for b in BOUNDS if b >= true), default=math.inf)


@given(st.lists(st.tuples(st.floats(0, 8), st.integers(1, 5)), max_size=10))
def test_times_counts_a_value_that_often(pairs):
    once, often = Histogram.over(BOUNDS), Histogram.over(BOUNDS)
    for value, times in pairs:
        often.observe(value, times)
        for _ in range(times):
            once.observe(value)
    assert often.counts == once.counts
    assert often.sum == pytest.approx(once.sum)
