"""The time between tokens, while the sequences of a step stay the same and when they change."""

import pytest

from rollout_engine.results.request_timer import RequestTimer


@pytest.fixture
def timer():
    return RequestTimer()


def test_every_token_but_the_first_counts_since_the_step_that_sampled_the_one_before(timer):
    for start, sequence_ids in ((1.0, [0, 1]), (2.0, [0, 1]), (4.0, [0, 1, 2]), (7.0, [1, 2]), (11.0, [0, 1, 2])):
        timer.tokens(sequence_ids, start)
    seconds = timer.stats.inter_token_seconds
    # 0: 1, 2, 7 since it was last sampled; 1: 1, 2, 3, 4; 2: 3, 4
    assert (seconds.count, seconds.sum) == (9, 27.0)


def test_an_ended_sequence_whose_id_comes_again_starts_anew(timer):
    for start in (1.0, 2.0):
        timer.tokens([5, 6], start)
    timer.record_sequence_end(5, "length", {0}, 0)
    timer.forget_sequences([6])
    timer.tokens([5, 6], 9.0)
    seconds = timer.stats.inter_token_seconds
    assert (seconds.count, seconds.sum) == (2, 2.0)
