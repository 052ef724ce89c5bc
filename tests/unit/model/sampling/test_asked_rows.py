"""Which rows of a flat batch a step needs logits of."""

import numpy as np

from rollout_engine.model.sampling.asked_rows import AskedRows

STARTS = np.array([0, 1, 5, 8], np.int64)
"""Chunks of 1, 4 and 3 tokens."""


def test_samples_of_one_prompt_share_a_row_and_rows_of_prompts_follow():
    asked = AskedRows.of([0, 1, 1, 2], STARTS, None, [5, 6])
    assert asked.logit_rows.tolist() == [0, 4, 7, 5, 6] and asked.num_drawn == 3
    assert asked.drawn_rows.tolist() == [0, 1, 1, 2] and asked.flat_rows.tolist() == [0, 4, 4, 7]
    assert not asked.takes_all_in_order(3)


def test_rows_of_drafted_tokens_come_before_the_last_of_their_chunk():
    asked = AskedRows.of([1, 2], STARTS, np.array([0, 2, 1]), [])
    assert asked.logit_rows.tolist() == [2, 3, 4, 6, 7] and asked.num_drawn == 5
    assert asked.drawn_rows.tolist() == [0, 3]


def test_a_step_that_decodes_alone_takes_all_rows_in_order():
    assert AskedRows.of([0, 1, 2], np.arange(4), None, []).takes_all_in_order(3)
    assert AskedRows.of([], np.zeros(1, np.int64), None, []).num_drawn == 0
