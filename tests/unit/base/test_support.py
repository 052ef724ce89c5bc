"""Supports of sequences: packed rows, their checks, and the bounds of a request."""

import numpy as np
import pytest

from rollout_engine.base import support
from rollout_engine.base.errors import RequestError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.sequence_rows import SupportIds
from rollout_engine.base.support import Support, check_num_support_ids, checked_support, is_over_support

ROWS = [[3, 4, 8], [7], [], [2, 9]]


def test_rows_are_packed_and_given_back():
    packed = Support.of(ROWS)
    assert packed.offsets.tolist() == [0, 3, 4, 4, 6] and packed.offsets.dtype == np.int64
    assert packed.ids.tolist() == [3, 4, 8, 7, 2, 9] and packed.ids.dtype == np.int32
    assert packed.lists() == ROWS and len(packed) == 4
    assert len(Support.of([])) == 0 and Support.of([]).lists() == []
    assert checked_support("support", packed, 10) is packed


def test_parts_stand_at_their_tokens_with_empty_rows_between():
    parts = [(1, Support.of([[5], [6, 7]])), (4, Support.of([[8]]))]
    assert Support.place(parts, 6).lists() == [[], [5], [6, 7], [], [8], []]


@pytest.mark.parametrize(
    "given, message",
    [
        ([[3]], r"support\[1\]='list' is not allowed: must be a Support"),
        (Support(np.array([0, 1], np.int32), np.array([3], np.int32)), "other arrays.*int64 offsets"),
        (Support(np.array([0, 2]), np.array([3], np.int32)), "offsets that do not divide its ids"),
        (Support(np.array([0, 2, 1, 3]), np.array([3, 4, 5], np.int32)), "offsets that do not divide its ids"),
        (Support.of([[1], [4, 4]]), r"support\[1\]\[1\]=4 is not allowed: must be ascending ids in \[0, 10\)"),
        (Support.of([[1], [], [2, 10]]), r"support\[1\]\[2\]=10"),
        (Support.of([[-1, 3]]), r"support\[1\]\[0\]=-1"),
    ],
)
def test_what_is_no_support_is_refused(given, message):
    with pytest.raises(RequestError, match=message):
        checked_support("support[1]", given, 10)


@pytest.mark.parametrize(
    "params, bound",
    [
        (dict(top_k=50), 2**28 // 50),
        (dict(top_k=50, top_p=0.9), 2**28 // 50),
        (dict(n=4, allowed_token_ids=[1, 2]), 2**28 // 8),
        (dict(bad_words=["a"]), 2**28 // 1000),
    ],
)
def test_supports_that_may_not_fit_are_refused_before_anything_is_drawn(params, bound):
    given = SamplingParams(return_support=True, **params)
    check_num_support_ids(given, bound, 1000)
    with pytest.raises(RequestError, match=f"return_support.*at most {2**28} ids.*max_tokens={bound} or less"):
        check_num_support_ids(given, bound + 1, 1000)
    check_num_support_ids(given.clone(return_support=False), bound + 1, 1000)


@pytest.mark.parametrize(
    "params",
    [{}, dict(temperature=0.0, top_k=3), dict(top_p=0.9), dict(min_p=0.1), dict(structured_outputs={"regex": "a"})],
)
def test_supports_that_list_nothing_or_depend_on_the_draw_are_not(params):
    check_num_support_ids(SamplingParams(return_support=True, **params), 2**30, 2**18)


def test_stop_ids_held_back_count_for_their_tokens_alone():
    check_num_support_ids(SamplingParams(return_support=True, min_tokens=1024), 2**30, 2**18)
    with pytest.raises(RequestError, match="1025 tokens x up to 262144 ids"):
        check_num_support_ids(SamplingParams(return_support=True, min_tokens=1025), 2**30, 2**18)


def test_log_probs_are_over_supports_if_they_are_processed_and_logits_the_models_own():
    asks = SamplingParams(return_support=True, logprobs_mode="processed", top_p=0.9)
    assert is_over_support(asks)
    for more in (dict(return_support=False), dict(logprobs_mode="tempered"), dict(logit_bias={1: 1.0})):
        assert not is_over_support(asks.clone(**more))
    assert not is_over_support(asks.clone(repetition_penalty=1.1))


def test_rows_of_sequences_may_be_empty_and_are_kept_by_id(monkeypatch):
    rows = {7: np.int32([]), 3: np.int32([1, 2]), 5: np.int32([]), 9: np.int32([4])}
    monkeypatch.setattr("rollout_engine.base.sequence_rows._PIECE_VALUES", 2)
    packed = SupportIds.of(rows)
    assert {id: row.tolist() for id, row in packed.rows()} == {7: [], 3: [1, 2], 5: [], 9: [4]}
    assert {id: row.tolist() for id, row in packed.keep([9, 5, 4]).rows()} == {9: [4], 5: []}
    assert packed.keep([4]) is None and SupportIds.of({}) is None
    assert [id for id, _ in packed.offset_ids(3).rows()] == [4, 0, 2, 6]
    assert [row.tolist() for _, row in SupportIds([1, 2], [0, 0], []).rows()] == [[], []]
    with pytest.raises(ValueError, match="SupportIds: sequence_ids, widths and pieces do not fit"):
        SupportIds([1], [2], [np.int32([1])])


def test_the_share_of_a_sample_is_that_of_its_request():
    assert support.too_many_support_ids(2**28, 1) == ""
    assert "return_support" in support.too_many_support_ids(2**27 + 1, 2)
