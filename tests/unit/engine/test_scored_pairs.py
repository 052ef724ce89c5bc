"""Prompts and completions to score are checked before anything is computed."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.token_scores import TokenScores
from rollout_engine.engine.scored_pairs import score_pairs


class Scorer:
    """Records what it is asked for; every token scores its own id."""

    info = SimpleNamespace(vocab_size=259, max_model_len=32)

    def __init__(self):
        self.calls = []

    def score(self, sequences, num_prompt, temperature):
        self.calls.append(temperature)
        for i, (ids, start) in enumerate(zip(sequences, num_prompt, strict=True)):
            yield {i: TokenScores(np.array(ids[start:], np.float32))}


def scores_of(*args):
    """What `score_pairs` returns, and how often it yields."""
    pieces, num_yields = score_pairs(*args), 0
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value, num_yields
        num_yields += 1


def test_arrays_and_numpy_numbers_are_taken_and_empty_completions_cost_nothing():
    scorer, ids = Scorer(), np.array([5, 6], np.int32)
    scores, _ = scores_of(scorer, [ids, [7]], [ids, []], np.float64(0.5))
    assert [score.logprobs.tolist() for score in scores] == [[5, 6], []] and scorer.calls == [0.5]
    assert scores_of(scorer, [[7]], [[]], 0.0)[0][0].logprobs.size == 0 and len(scorer.calls) == 1
    scores_of(scorer, [[7]], [[8]], 0.0)
    assert scorer.calls == [0.5, 1.0]


@pytest.mark.parametrize(
    "prompts, completions, temperature, words",
    [
        ([[]], [[5]], 1.0, r"prompt_token_ids\[0\].*at least one token"),
        ([[5], [5]], [[5], [259]], 1.0, r"completion_token_ids\[1\]\[0\]=259"),
        ([[5] * 20], [[5] * 13], 1.0, "33 tokens.*max_model_len=32"),
        ([[5]], [], 1.0, "one for each of the 1 prompts"),
        ([[5]], [[5]], math.nan, "temperature=nan"),
        ([[5]], [[5]], -1.0, "temperature=-1.0"),
        ([[5]], [[5]], "hot", "temperature='hot'"),
    ],
)
def test_bad_scores_are_refused(prompts, completions, temperature, words):
    with pytest.raises(RequestError, match=words):
        scores_of(Scorer(), prompts, completions, temperature)


def test_it_yields_between_two_pieces_and_looks_for_weights_before_each():
    looks = []
    scores, num_yields = scores_of(Scorer(), [[5]] * 4, [[6], [], [7], [8]], 1.0, lambda: looks.append(1))
    assert [score.logprobs.tolist() for score in scores] == [[6], [], [7], [8]]
    assert (num_yields, len(looks)) == (2, 3)
