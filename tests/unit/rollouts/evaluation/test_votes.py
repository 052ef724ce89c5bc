"""pass@k and maj@k beside slow truths: every choice of k samples, one by one."""

import itertools
import random
from collections import Counter
from fractions import Fraction

import pytest

from rollout_engine.rollouts.evaluation.votes import majority_at_k, pass_at_k


def slow_pass(correct, k):
    choices = list(itertools.combinations(correct, k))
    return Fraction(sum(any(choice) for choice in choices), len(choices))


def slow_majority(answers, correct, k):
    right = {}
    for answer in set(answers) - {None}:
        of_it = [ok for other, ok in zip(answers, correct, strict=True) if other == answer]
        right[answer] = Fraction(sum(of_it), len(of_it))
    total, choices = Fraction(0), list(itertools.combinations(answers, k))
    for choice in choices:
        votes = Counter(answer for answer in choice if answer is not None)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        total += sum((right[answer] for answer in winners), Fraction(0)) / max(1, len(winners))
    return total / len(choices)


@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_random_prompts_agree_with_every_choice_tried(seed):
    draws = random.Random(seed)
    for _ in range(100):
        count = draws.randint(1, 8)
        k = draws.randint(1, count)
        answers = [draws.choice(["a", "b", "c", "d", None]) for _ in range(count)]
        correct = [answer == "a" or draws.random() < 0.2 for answer in answers]
        correct = [ok and answer is not None for ok, answer in zip(correct, answers, strict=True)]
        assert pass_at_k(count, sum(correct), k) == pytest.approx(float(slow_pass(correct, k)), abs=1e-12)
        assert majority_at_k(answers, correct, k) == pytest.approx(float(slow_majority(answers, correct, k)), abs=1e-12)


def test_pass_at_k_is_unbiased():
    """Over draws of n samples its mean is 1 - (1 - p)^k."""
    draws, p, k = random.Random(0), 0.3, 3
    found = [pass_at_k(8, sum(draws.random() < p for _ in range(8)), k) for _ in range(20_000)]
    assert sum(found) / len(found) == pytest.approx(1 - (1 - p) ** k, abs=0.01)


def test_all_samples_make_one_vote():
    assert majority_at_k(["a", "b", "a"], [True, False, True], 3) == 1.0
    assert majority_at_k(["a", "b"], [True, False], 2) == 0.5
    assert majority_at_k([None, None], [False, False], 2) == 0.0


def test_many_samples_take_no_longer_than_a_person_waits():
    answers = [str(index % 40) for index in range(128)]
    assert 0 < majority_at_k(answers, [answer == "7" for answer in answers], 64) < 1


@pytest.mark.parametrize("k", [0, 4])
def test_k_is_bounded_by_the_samples(k):
    with pytest.raises(ValueError, match=r"k=\d must be in \[1, 3\]"):
        pass_at_k(3, 1, k)
