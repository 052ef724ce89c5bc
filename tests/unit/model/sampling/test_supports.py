"""The ids that truncation and masks leave to a draw, and the log-probs of mode "processed" over them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.base.messages import NewSequence
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.kernels.row_stats import TokenSets
from rollout_engine.kernels.support_logprobs import support_logprobs
from rollout_engine.model.sampling.draft_draws import taken
from rollout_engine.model.sampling.draw_pieces import joined
from rollout_engine.model.sampling.logit_edits import LogitEdits
from rollout_engine.model.sampling.row_edits import RowEdits
from rollout_engine.model.sampling.sampler import sample
from rollout_engine.model.sampling.sampling_batch import SamplingBatch

VOCAB_SIZE, END = 150, 2
BAD = [[9], [1, 7], [4, 8]]
"""Spellings of bad words, of which the first two are complete behind token 1."""


def logits_of(n, seed=0, dtype=torch.float32):
    rows = torch.randn(n, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    return (rows * 4).round().div(4).to(dtype)  # many ties


def draw(params, logits, first_seed=0):
    n = len(params)
    batch = SamplingBatch.from_tasks(params, [first_seed + row for row in range(n)], [2] * n)
    edits = RowEdits()
    for row, each in enumerate(params):
        words = BAD if each.bad_words else []
        sequence = NewSequence(row, [1, 1], 1, each, seed=0, eos_token_ids=[END], bad_words=words)
        found = LogitEdits.of(sequence, (), VOCAB_SIZE)
        if found is not None and found.active_at(2):
            edits[row] = found
    return sample(logits, batch, edits)


def expected_ids(params, row):
    """The ids left of one row, [] if nothing was cut, by sorting all of them."""
    left = np.ones(VOCAB_SIZE, np.bool_)
    if params.allowed_token_ids:
        left &= np.isin(np.arange(VOCAB_SIZE), params.allowed_token_ids)
    if params.bad_words:
        left[[9, 7]] = False
    if params.min_tokens:
        left[END] = False
    if params.temperature:
        logits = np.where(left, row.double().numpy(), -np.inf)
        order = np.argsort(-logits, kind="stable")[: int(left.sum())]
        weights = np.exp((logits[order] - logits[order[0]]) / params.temperature)
        num = params.top_k or len(order)
        shares = np.cumsum(weights[:num]) / weights[:num].sum()
        if params.top_p < 1:
            num = min(num, 1 + int((shares < params.top_p).sum()))
        left[order[num:]] = False
        left[order[weights < params.min_p]] = False
    return [] if left.all() else left.nonzero()[0].tolist()


def over_support(logits, token_id, params, ids):
    sets = TokenSets(torch.tensor([0, len(ids)]), torch.from_numpy(ids))
    return support_logprobs(logits[None], torch.tensor([token_id]), params.temperature, sets)


any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 20, VOCAB_SIZE]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    allowed_token_ids=st.sampled_from([None, [7, 3, 90, 91, 92], list(range(VOCAB_SIZE))]),
    bad_words=st.sampled_from([None, ["w"]]),
    min_tokens=st.sampled_from([0, 9]),
    logprobs=st.just(0),
    logprobs_mode=st.sampled_from(["tempered", "processed"]),
    return_support=st.booleans(),
)


@given(
    params=st.lists(any_params, min_size=1, max_size=4),
    seed=st.integers(0, 99),
    broken=st.integers(0, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=150)
def test_rows_that_ask_get_the_ids_left_and_processed_log_probs_are_over_these(params, seed, broken, dtype):
    logits = logits_of(len(params), seed, dtype)
    if broken < len(params):
        logits[broken, 3] = torch.nan
    out = draw(params, logits, seed)
    plain = draw([each.clone(return_support=False) for each in params], logits, seed)
    assert (out.token_ids, out.logprobs, out.errors) == (plain.token_ids, plain.logprobs, plain.errors)
    assert plain.supports == {}
    asked = [row for row, each in enumerate(params) if each.return_support and row not in out.errors]
    assert sorted(out.supports) == asked
    for row in asked:
        ids = out.supports[row]
        assert ids.dtype == np.int32 and ids.tolist() == expected_ids(params[row], logits[row])
        if params[row].logprobs_mode == "processed":
            found = over_support(logits[row], out.token_ids[row], params[row], ids)
            assert found.numpy().tobytes() == np.float32(out.logprobs[row]).tobytes()


@pytest.mark.parametrize("more", [dict(presence_penalty=1.5), dict(logit_bias={3: 4.0})])
def test_with_penalties_and_bias_the_ids_are_those_left_of_edited_logits(more):
    params = SamplingParams(top_k=5, logprobs=0, logprobs_mode="processed", return_support=True, **more)
    logits = logits_of(1)
    logits[0, 1] = logits[0].topk(5).values[-1] + 0.25  # one that the penalty removes from the first five
    out = draw([params], logits)
    edited = logits[0].clone()
    if params.logit_bias:
        edited[3] += 4.0
    else:
        edited[1] -= 1.5
    assert out.supports[0].tolist() == expected_ids(SamplingParams(top_k=5), edited)


def test_supports_follow_their_rows_where_outputs_are_joined_and_chosen():
    asks, plain = SamplingParams(top_k=3, return_support=True), SamplingParams()
    first, second = draw([plain, asks], logits_of(2)), draw([asks, plain], logits_of(2, seed=1))
    both = joined([first, second])
    assert {row: ids.tolist() for row, ids in both.supports.items()} == {
        1: first.supports[1].tolist(),
        2: second.supports[0].tolist(),
    }
    assert list(taken(both, [2, 0]).supports) == [0]
    assert taken(both, [2, 0]).supports[0].tolist() == second.supports[0].tolist()
