"""Ranks of sampled tokens, and log-probs of given token ids, as the sampler tells them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.base.messages import NewSequence
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.kernels.token_logprobs import token_logprobs
from rollout_engine.model.sampling.logit_edits import LogitEdits
from rollout_engine.model.sampling.row_edits import RowEdits
from rollout_engine.model.sampling.sampler import ranks_of, sample
from rollout_engine.model.sampling.sampling_batch import SamplingBatch

VOCAB_SIZE = 150


def logits_of(n, seed=0, dtype=torch.float32):
    rows = torch.randn(n, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    return (rows * 4).round().div(4).to(dtype)  # many ties


def draw(params, logits):
    batch = SamplingBatch.from_tasks(params, list(range(len(params))), list(range(len(params))))
    edits = RowEdits()
    for row, each in enumerate(params):
        found = LogitEdits.of(NewSequence(row, [1, 1], 1, each, seed=0), (), VOCAB_SIZE)
        if found is not None:
            edits[row] = found
    return sample(logits, batch, edits)


any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    logprobs=st.sampled_from([None, 0, 4, 60, -1]),
    logprob_token_ids=st.sampled_from([None, [], [7], [149, 0, 7, 7]]),
    logprobs_mode=st.sampled_from(["raw", "tempered", "processed"]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
)


@given(params=st.lists(any_params, min_size=1, max_size=5), seed=st.integers(0, 99), broken=st.integers(0, 9))
@settings(max_examples=150)
def test_every_row_gets_what_it_asked_for_and_agrees_with_the_most_likely(params, seed, broken):
    logits = logits_of(len(params), seed)
    if broken < len(params):
        logits[broken, 3] = torch.nan
    out = draw(params, logits)
    full = draw([each.clone(logprobs=64, logprob_token_ids=list(range(VOCAB_SIZE))) for each in params], logits)
    assert out.token_ids == full.token_ids
    sound = [row for row in range(len(params)) if row not in out.errors]
    assert set(out.id_logprobs) == {row for row in sound if params[row].asks_for_ids}
    assert (out.sampled_ranks is None) == (not any(each.wants_ranks for each in params))
    for row in sound:
        by_id = full.id_logprobs[row]
        top_ids, top = (column[row] for column in full.top_logprobs)
        assert np.array_equal(by_id[top_ids], top)
        rank = full.sampled_ranks[row]
        assert rank > 64 or top_ids[rank - 1] == out.token_ids[row]
        assert out.sampled_ranks is None or out.sampled_ranks[row] == (rank if params[row].wants_ranks else 0)
        if row in out.id_logprobs:
            asked = range(VOCAB_SIZE) if params[row].logprobs == -1 else params[row].logprob_token_ids
            assert out.id_logprobs[row].dtype == np.float32
            assert np.array_equal(out.id_logprobs[row], by_id[list(asked)])
        if out.logprobs is not None and params[row].logprobs is not None:
            assert np.float32(out.logprobs[row]) == by_id[out.token_ids[row]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_of_ids_have_the_bits_of_the_trainers(dtype):
    logits = logits_of(2, dtype=dtype)
    out = draw([SamplingParams(temperature=0.7, logprob_token_ids=[9, 0, 9])] * 2, logits)
    for row in range(2):
        expected = token_logprobs(logits[[row] * 3], torch.tensor([9, 0, 9]), 0.7)
        assert np.array_equal(out.id_logprobs[row], expected.numpy())
    assert out.logprobs is None and out.sampled_ranks is None


def test_ranks_count_from_one_and_ties_go_to_the_lowest_id():
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, -torch.inf]]).expand(5, 5)
    assert ranks_of(logits, torch.arange(5)).tolist() == [3, 1, 4, 2, 5]


def test_who_asks_for_the_sampled_token_alone_pays_for_no_rank(monkeypatch):
    monkeypatch.setattr("rollout_engine.model.sampling.sampler.ranks_of", None)
    out = draw([SamplingParams(logprobs=0), SamplingParams()], logits_of(2))
    assert out.sampled_ranks is None and out.id_logprobs == {} and out.top_logprobs is None
