"""pass@k and maj@k of one prompt, from n >= k samples: the mean over all choices of k among them, exactly.

Both are unbiased: their expectation is that of k fresh samples (Chen et al., 2021, section 2.1, for pass@k).
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that k of the samples, drawn without replacement, hold a correct one: 1 - C(n - c, k) / C(n, k)."""
    _check(num_samples, k)
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_at_k(answers: Sequence[Hashable], correct: Sequence[bool], k: int) -> float:
    """Probability that the most frequent answer among k of the samples, drawn without replacement, is correct.

    Among answers that are equally frequent one is drawn, each as likely. `answers`: None if a sample has none; it
    takes no part in the vote, and a draw without any answer is not correct. Samples of one answer that are not all
    correct count by their share.
    """
    _check(len(answers), k)
    sizes = Counter(answer for answer in answers if answer is not None)
    right = Counter(answer for answer, ok in zip(answers, correct, strict=True) if ok)
    without = len(answers) - sizes.total()
    won = 0.0
    for answer, size in sizes.items():
        if right[answer]:
            others = sizes.copy()
            del others[answer]
            won += right[answer] / size * _wins(size, list(others.values()), without, k)
    return won / math.comb(len(answers), k)


def _wins(size: int, others: Sequence[int], without: int, k: int) -> float:
    """Choices of k samples in which an answer of `size` samples wins; a tie among m counts 1/m."""
    won = 0.0
    for votes in range(1, min(size, k) + 1):
        for num_tied, ways in _ways(others, without, k - votes, votes).items():
            won += math.comb(size, votes) * ways / (num_tied + 1)
    return won


def _ways(others: Sequence[int], without: int, num: int, most: int) -> dict[int, int]:
    """Number of other answers with exactly `most` votes -> choices of `num` samples in which no other has more."""
    table = {(count, 0): math.comb(without, count) for count in range(min(without, num) + 1)}
    for size in others:
        grown: dict[tuple[int, int], int] = {}
        for (count, num_tied), ways in table.items():
            for votes in range(min(size, most, num - count) + 1):
                key = (count + votes, num_tied + (votes == most))
                grown[key] = grown.get(key, 0) + ways * math.comb(size, votes)
        table = grown
    return {num_tied: ways for (count, num_tied), ways in table.items() if count == num}


def _check(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k} must be in [1, {num_samples}], the number of samples")
