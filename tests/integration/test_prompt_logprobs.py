"""`prompt_logprobs`: the bits of scoring and of sampling, in bounded memory, whatever else runs."""

import numpy as np
import pytest
import torch

from rollout_engine import LLM, SamplingParams
from rollout_engine.core import config
from rollout_engine.testing import tiny_checkpoint

VOCAB_SIZE = 259
PROMPT = [3 + (7 * i) % 250 for i in range(150)]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def checkpoint(request, tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), dtype=request.param)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, num_kv_blocks=512, log_stats=False) as llm:
        yield llm


def ask(llm, prompt=PROMPT, **params):
    params = {"max_tokens": 2, "ignore_eos": True, "prompt_logprobs": 0, "seed": 3} | params
    return llm.generate([prompt], SamplingParams(**params), use_tqdm=False)[0]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "params, temperature",
    [
        ({}, 1.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0.7, "logprobs_mode": "raw"}, 1.0),
        ({"temperature": 0.7, "logprobs_mode": "processed", "top_k": 3, "repetition_penalty": 2.0}, 0.7),
        ({"temperature": 0}, 1.0),
    ],
    ids=str,
)
def test_they_have_the_bits_of_scoring(llm, params, temperature):
    (scored,) = llm.score([PROMPT[:1]], [PROMPT[1:]], temperature=temperature)
    found = ask(llm, **params).prompt_logprobs
    assert np.isnan(found[0])
    assert found.dtype == np.float32
    assert np.array_equal(found[1:], scored)


def test_they_have_the_bits_with_which_the_same_tokens_were_sampled(llm):
    sampled = ask(llm, max_tokens=30, temperature=0.8, logprobs=4).outputs[0]
    again = ask(llm, PROMPT + sampled.token_ids, temperature=0.8, prompt_logprobs=4)
    assert np.array_equal(again.prompt_logprobs[150:], sampled.logprobs)
    for there, here in zip(again.prompt_top_logprobs, sampled.top_logprobs, strict=True):
        assert np.array_equal(there[150:], here)


def test_top_logprobs_are_the_most_likely_tokens_of_each_position(llm):
    found = ask(llm, prompt_logprobs=5)
    ids, logprobs = found.prompt_top_logprobs
    assert (ids.shape, ids.dtype, logprobs.dtype) == ((150, 5), np.int32, np.float32)
    assert ids[0].tolist() == [-1] * 5
    assert np.isnan(logprobs[0]).all()
    assert (np.diff(logprobs[1:], axis=1) <= 0).all()
    every = ask(llm, prompt_logprobs=64, prompt=PROMPT[:20])
    inside = [np.flatnonzero(row == token) for row, token in zip(every.prompt_top_logprobs[0], PROMPT, strict=False)]
    for position, places in enumerate(inside):
        for place in places:
            assert every.prompt_top_logprobs[1][position, place] == every.prompt_logprobs[position]
    assert any(len(places) for places in inside)


def test_of_more_tokens_than_at_sampled_positions_too(llm):
    every, many = (ask(llm, prompt_logprobs=k) for k in (-1, 200))
    for whole, part in zip(every.prompt_top_logprobs, many.prompt_top_logprobs, strict=True):
        assert part.shape == (150, 200)
        assert np.array_equal(part, whole[:, :200], equal_nan=True)
    assert np.array_equal(every.prompt_ranks, many.prompt_ranks)


def test_every_token_of_the_vocabulary_is_told_on_request(llm):
    few, every = (ask(llm, PROMPT[:20], prompt_logprobs=k, max_tokens=2, seed=1, logprobs=k) for k in (64, -1))
    ids, logprobs = every.prompt_top_logprobs
    assert np.array_equal(ids[:, :64], few.prompt_top_logprobs[0])
    assert np.array_equal(logprobs[:, :64], few.prompt_top_logprobs[1], equal_nan=True)
    assert (np.sort(ids[1:], axis=1) == np.arange(ids.shape[1])).all()
    np.testing.assert_allclose(np.exp(logprobs[1:].astype(float)).sum(1), 1.0, rtol=1e-5)
    for whole, part in zip(every.outputs[0].top_logprobs, few.outputs[0].top_logprobs, strict=True):
        assert np.array_equal(whole[:, :64], part)
    assert ask(llm, [5], prompt_logprobs=-1).prompt_top_logprobs[0].shape == (1, ids.shape[1])


def test_a_prompt_of_one_token_has_none(llm):
    found = ask(llm, [5], prompt_logprobs=1)
    assert np.isnan(found.prompt_logprobs).tolist() == [True]


def test_who_does_not_ask_gets_none(llm):
    found = ask(llm, prompt_logprobs=None)
    assert found.prompt_logprobs is found.prompt_top_logprobs is None


def test_a_known_prefix_is_computed_again_for_who_asks_and_found_by_others(llm):
    first, second = ask(llm), ask(llm)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    assert np.array_equal(first.prompt_logprobs, second.prompt_logprobs, equal_nan=True)
    assert ask(llm, prompt_logprobs=None).num_cached_tokens == 144


def test_samples_share_them_and_keep_their_tokens(llm):
    alone = ask(llm, n=4, max_tokens=12, prompt_logprobs=None)
    found = ask(llm, n=4, max_tokens=12, prompt_logprobs=2)
    assert [sample.token_ids for sample in found.outputs] == [sample.token_ids for sample in alone.outputs]
    assert np.array_equal(found.prompt_logprobs, ask(llm).prompt_logprobs, equal_nan=True)
    assert llm.frontend.client.driver.executor.worker.runner._prompts._prompts == {}


def test_truncation_leaves_those_of_what_is_kept(llm):
    found = ask(llm, truncate_prompt_tokens=40)
    assert found.prompt_token_ids == PROMPT[-40:]
    assert np.array_equal(found.prompt_logprobs, ask(llm, PROMPT[-40:]).prompt_logprobs, equal_nan=True)


def test_streams_tell_them_once(llm):
    engine = llm.llm_engine
    engine.add_request("s", PROMPT, SamplingParams(max_tokens=5, prompt_logprobs=0, output_kind="delta", n=2))
    told = []
    while engine.has_unfinished_requests():
        told += [output.prompt_logprobs is not None for output in engine.step()]
    assert told == [True] + [False] * (len(told) - 1)


def test_a_step_computes_a_bounded_number_of_logits_and_everyone_keeps_their_bits(llm, checkpoint, monkeypatch):
    alone = ask(llm, prompt_logprobs=3)
    ordinary = ask(llm, PROMPT[:90], prompt_logprobs=None, logprobs=0, max_tokens=20)
    monkeypatch.setattr(config, "_MAX_PROMPT_LOGITS", 32 * VOCAB_SIZE)
    with LLM(checkpoint, num_kv_blocks=512, max_num_batched_tokens=100, log_stats=False) as small:
        model, sizes = small.frontend.client.driver.executor.worker.runner.model, []
        forward = model.forward_states
        monkeypatch.setattr(
            model, "forward_states", lambda batch, rows, *more: sizes.append(len(rows)) or forward(batch, rows, *more)
        )
        params = dict(max_tokens=2, ignore_eos=True, seed=3)
        asking = SamplingParams(**params, prompt_logprobs=3)
        others = SamplingParams(**(params | {"max_tokens": 20}), logprobs=0)
        found = small.generate([PROMPT] * 3 + [PROMPT[:90]] * 2, [asking] * 3 + [others] * 2, use_tqdm=False)
    assert max(sizes) <= 32 + 5
    for each in found[:3]:
        assert np.array_equal(each.prompt_logprobs, alone.prompt_logprobs, equal_nan=True)
        assert np.array_equal(each.prompt_top_logprobs[0], alone.prompt_top_logprobs[0])
        assert each.outputs[0].token_ids == alone.outputs[0].token_ids
    for each in found[3:]:
        assert each.outputs[0].token_ids == ordinary.outputs[0].token_ids
        assert np.array_equal(each.outputs[0].logprobs, ordinary.outputs[0].logprobs)


def test_preemption_does_not_change_them(llm, checkpoint):
    expected = ask(llm, prompt_logprobs=2, max_tokens=40)
    with LLM(checkpoint, num_kv_blocks=22, log_stats=False) as tight:
        params = SamplingParams(max_tokens=40, ignore_eos=True, prompt_logprobs=2, seed=3)
        found = tight.generate([PROMPT] * 3, params, use_tqdm=False)
        assert tight.llm_engine.stats.num_preemptions > 0
    for each in found:
        assert np.array_equal(each.prompt_logprobs, expected.prompt_logprobs, equal_nan=True)
        assert each.outputs[0].token_ids == expected.outputs[0].token_ids
