"""Intervals and p-values beside scipy's."""

import numpy as np
import pytest
from scipy import stats

from rollout_engine.rollouts.evaluation import intervals
from rollout_engine.rollouts.evaluation.intervals import mean_interval, paired_difference


def draw(generator):
    count = int(generator.integers(2, 40))
    kind = generator.integers(3)
    if kind == 0:
        return generator.random(count)
    return generator.integers(0, 2, count) * 1.0 if kind == 1 else generator.integers(0, 9, count) / 8.0


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_random_intervals_are_scipys(seed):
    generator = np.random.default_rng(seed)
    for _ in range(100):
        values = draw(generator)
        estimate = mean_interval(values, num_resamples=300)
        assert estimate.value == pytest.approx(values.mean())
        if np.ptp(values) == 0:
            assert estimate.low == estimate.high == pytest.approx(values.mean())
            continue
        found = stats.bootstrap(
            (values,), np.mean, n_resamples=300, method="percentile", rng=np.random.default_rng(0)
        ).confidence_interval
        assert (estimate.low, estimate.high) == pytest.approx((found.low, found.high), abs=1e-12)


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_random_p_values_are_scipys(seed):
    generator = np.random.default_rng(100 + seed)
    for _ in range(100):
        count = int(generator.integers(2, 10))
        a, b = generator.integers(0, 5, (2, count)) / 4.0
        found = stats.permutation_test((b - a,), np.mean, permutation_type="samples", n_resamples=np.inf)
        assert paired_difference(a, b).p_value == pytest.approx(found.pvalue, abs=1e-9)


def test_p_values_of_many_prompts_come_near_the_exact_ones():
    generator = np.random.default_rng(3)
    a = generator.integers(0, 2, 90) * 1.0
    b = np.clip(a + generator.integers(-1, 3, 90) // 2, 0, 1)
    ups, changed = int((b > a).sum()), int((b != a).sum())
    exact = stats.binomtest(ups, changed).pvalue  # flips of equal differences: the sign test
    assert changed > intervals._MOST_EXACT
    assert paired_difference(a, b).p_value == pytest.approx(exact, abs=0.02)


def test_intervals_cover_the_truth_as_often_as_they_say():
    generator, covered = np.random.default_rng(0), 0
    for _ in range(400):
        estimate = mean_interval((generator.random(60) < 0.4) * 1.0, num_resamples=400)
        covered += estimate.low <= 0.4 <= estimate.high
    assert 0.90 <= covered / 400 <= 0.985


def test_draws_in_pieces_are_the_same(monkeypatch):
    values = np.random.default_rng(0).random(37)
    whole, paired = mean_interval(values), paired_difference(values, values[::-1])
    monkeypatch.setattr(intervals, "_CHUNK", 1000)
    assert mean_interval(values) == whole
    assert paired_difference(values, values[::-1]).p_value == pytest.approx(paired.p_value, abs=0.02)


def test_one_prompt_has_no_interval():
    assert mean_interval(np.array([0.5])) == (0.5, None, None)
    assert paired_difference(np.array([0.5]), np.array([1.0])) == (0.5, None, None, None)


def test_equal_results_do_not_differ():
    values = np.random.default_rng(0).random(20)
    assert paired_difference(values, values) == (0.0, 0.0, 0.0, 1.0)
