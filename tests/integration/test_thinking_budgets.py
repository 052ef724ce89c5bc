"""Budgets of thinking on a real tiny model: forced tokens, their log-probs, and the masks without them."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from envs_adapters import Observation
from rollout_engine import (
    LLM,
    AsyncLLM,
    RolloutPolicy,
    SamplingParams,
    SpeculationConfig,
    advantages,
    concat,
    exact,
    minibatches,
    read_jsonl,
    replay,
    to_jsonl,
)
from rollout_engine.batches.jsonl import samples as samples_of
from rollout_engine.batches.output_samples import output_samples
from rollout_engine.batches.trl import to_trl, to_trl_rollout
from rollout_engine.testing import tiny_checkpoint

OPTIONS = dict(dtype="float32", num_kv_blocks=256, max_model_len=256, log_stats=False)
OPEN, CLOSED = "think <think>", "plain"
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, thinking_budget=5, logprobs=0, seed=1)
BRACKETS = PARAMS.clone(thinking_start="(", thinking_end=")", logit_bias={10: 4.0, 11: 2.0})
"""Tags of one byte, ids 10 and 11, that the model samples now and then."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, **OPTIONS) as llm:
        yield llm


def sampled(llm, prompts, params):
    return [each for output in llm.generate(prompts, params, use_tqdm=False) for each in output.outputs]


def shown(samples):
    """All that must not depend on how samples are computed."""
    return [(s.token_ids, s.logprobs.tobytes(), s.forced.tolist(), s.finish_reason) for s in samples]


def test_the_closing_text_follows_the_budget(llm):
    tokenizer = llm.get_tokenizer()
    end = tokenizer.encode("</think>", add_special_tokens=False)
    opened, closed, free = sampled(llm, [OPEN, CLOSED, OPEN], [PARAMS, PARAMS, PARAMS.clone(thinking_budget=None)])
    assert opened.token_ids[5 : 5 + len(end)] == end
    assert opened.forced.tolist() == [5 <= place < 5 + len(end) for place in range(24)]
    assert opened.token_ids[:5] == free.token_ids[:5]  # seeds and positions alone decide draws
    assert "</think>" in opened.text and not closed.forced.any() and free.forced is None
    assert len(closed.token_ids) == 24


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_log_probs_of_forced_tokens_are_the_policys(llm, temperature):
    params = BRACKETS.clone(temperature=temperature, n=3, top_k=40)
    output = llm.generate("so (", params, use_tqdm=False)[0]
    pairs = [(output.prompt_token_ids, each.token_ids) for each in output.outputs]
    scores = llm.score([p for p, _ in pairs], [c for _, c in pairs], temperature=temperature or 1.0)
    assert sum(each.forced.sum() for each in output.outputs) > 0
    for each, score in zip(output.outputs, scores, strict=True):
        assert np.asarray(each.logprobs).tobytes() == np.asarray(score, np.float32).tobytes()


def test_nothing_was_cut_of_a_forced_token(llm):
    params = PARAMS.clone(top_k=3, logprobs_mode="processed", seed=2)
    [sample] = sampled(llm, [OPEN], params)
    [tempered] = sampled(llm, [OPEN], params.clone(logprobs_mode="tempered"))
    assert sample.forced.any() and not sample.kept_logprob_mass[sample.forced].any()
    assert (sample.kept_logprob_mass[~sample.forced] < 0).all() and not sample.logprobs[sample.forced].any()
    assert (tempered.logprobs[tempered.forced] < 0).all() and not tempered.kept_logprob_mass[tempered.forced].any()


def test_masks_and_processors_forbid_no_forced_token(llm):
    end = llm.get_tokenizer().encode("</think>", add_special_tokens=False)
    strict = dict(allowed_token_ids=[60, 61], bad_words=["</"], presence_penalty=1.0, logprobs_mode="processed")
    [sample] = sampled(llm, OPEN, PARAMS.clone(**strict))
    assert sample.token_ids[5 : 5 + len(end)] == end
    assert set(sample.token_ids[:5] + sample.token_ids[13:]) <= {60, 61}
    assert not sample.logprobs[5:13].any()  # the only token of the distribution that it is from


@pytest.mark.slow
def test_a_grammar_of_tags_takes_forced_tokens(llm):
    pytest.importorskip("llguidance")
    tag = {"structures": [{"begin": "(a", "schema": {"type": "integer"}, "end": ")"}], "triggers": ["(a"]}
    [sample] = sampled(llm, OPEN, PARAMS.clone(ignore_eos=False, structured_outputs={"structural_tag": tag}))
    assert sample.error is None and sample.forced[5:13].all()


def test_stops_and_ends_hold_for_forced_tokens(llm):
    cut, stopped, ended, late = sampled(
        llm,
        [OPEN] * 4,
        [
            PARAMS.clone(max_tokens=7),
            PARAMS.clone(stop=["</think>"]),
            BRACKETS.clone(stop_token_ids=[11], logit_bias=None, thinking_start="k>"),
            BRACKETS.clone(stop_token_ids=[11], logit_bias=None, thinking_start="k>", min_tokens=9),
        ],
    )
    assert (len(cut.token_ids), cut.finish_reason, int(cut.forced.sum())) == (7, "length", 2)
    assert (stopped.finish_reason, stopped.stop_reason, len(stopped.token_ids)) == ("stop", "</think>", 13)
    assert (ended.token_ids[-1], ended.stop_reason, len(ended.token_ids), ended.forced[-1]) == (11, 11, 6, True)
    assert late.token_ids[5] == 11 and len(late.token_ids) >= 9


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "options",
    [
        dict(max_num_batched_tokens=5),
        dict(num_kv_blocks=10, block_size=8, max_model_len=72),
        pytest.param(dict(async_scheduling=False, enable_prefix_caching=False), marks=pytest.mark.slow),
        dict(speculation=SpeculationConfig()),
        pytest.param(dict(tensor_parallel_size=2), marks=pytest.mark.slow),
    ],
    ids=["chunks", "preempted", "in turn", "drafts", "ranks"],
)
def test_forced_tokens_do_not_depend_on_how_they_are_computed(llm, checkpoint, options):
    params = [BRACKETS.clone(n=3), BRACKETS.clone(presence_penalty=0.5), PARAMS, PARAMS.clone(thinking_budget=0)]
    prompts = ["so (", "so ", OPEN, OPEN]
    expected = shown(sampled(llm, prompts, params))
    assert sum(sum(each[2]) for each in expected) > 10
    with LLM(checkpoint, **(OPTIONS | options)) as other:
        assert shown(sampled(other, prompts, params)) == expected
        assert shown(sampled(other, prompts, params)) == expected  # and with hits, and what was drafted from these


@pytest.mark.slow
def test_streams_and_other_processes_give_the_same(llm, checkpoint):
    expected = shown(sampled(llm, "so (", BRACKETS))

    async def stream():
        async with AsyncLLM(checkpoint, **OPTIONS) as engine:
            parts = [out.outputs[0] async for out in engine.generate("so (", BRACKETS.clone(output_kind="delta"))]
        return parts

    parts = asyncio.run(stream())
    assert sum((part.forced.tolist() for part in parts), []) == expected[0][2]
    assert sum((part.token_ids for part in parts), []) == expected[0][0]


def thinking_rollout(policy, params=BRACKETS, **options):
    params = params.clone(seed=None)
    return policy.rollout(["so (", "so "], params, **(dict(num_samples=4, seed=3, use_tqdm=False) | options))


@pytest.fixture(scope="module")
def policy(llm):
    return RolloutPolicy(llm)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_rollouts_leave_forced_tokens_out_and_the_trainer_agrees_on_them(policy, checkpoint, layout):
    batch = thinking_rollout(policy, layout=layout)
    forced, assistant = batch["masks", "forced"], batch["masks", "all_assistant_mask"]
    assert forced.any() and not (forced & assistant).any()
    response = batch["policy_version"] >= 0
    assert torch.equal(forced | assistant, response)
    trainer = exact.enable(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32))
    with torch.no_grad():
        logprobs = exact.token_logprobs(trainer, batch)
    theirs = batch["log_probs", "full"][:, 1:]
    assert torch.equal(logprobs[response[:, 1:]], theirs[response[:, 1:]])
    report = exact.check(batch, logprobs)
    assert report.is_exact and report.num_tokens == int(assistant.sum())
    assert torch.equal(policy.score(batch), batch["log_probs", "full"])
    own = policy.score(batch, candidate_ids=batch["tokens", "full"][..., None])
    assert torch.equal(own[..., 0], batch["log_probs", "full"])


def test_what_is_made_of_a_rollout_keeps_the_mask(policy, tmp_path):
    batch = thinking_rollout(policy)
    free = thinking_rollout(policy, BRACKETS.clone(thinking_budget=None))
    assert "forced" not in free["masks"].keys()
    both = concat([free, batch])
    assert int(both["masks", "forced"].sum()) == int(batch["masks", "forced"].sum()) > 0
    parts = list(minibatches(both, 3))
    assert sum(int(part["masks", "forced"].sum()) for part in parts) == int(both["masks", "forced"].sum())
    to_jsonl(batch, tmp_path / "batch.jsonl")
    lines = read_jsonl(tmp_path / "batch.jsonl")
    assert sum(sum(line["forced"]) for line in lines) == int(batch["masks", "forced"].sum())
    num_sampled = int(batch["masks", "all_assistant_mask"].sum())
    trl = to_trl(batch)
    assert int(trl["num_items_in_batch"]) == num_sampled == int((trl["tool_mask"] * trl["completion_mask"]).sum())
    assert sum(map(sum, to_trl_rollout(batch)["env_mask"])) == num_sampled
    width = batch["tokens", "full"].shape[1]
    paid = torch.ones(8, width), torch.zeros(8, width), batch["masks", "all_assistant_mask"]
    advantage, _ = advantages.gae(*paid)
    assert not advantage[batch["masks", "forced"]].any()
    assert f"sampled tokens {num_sampled}" in repr(batch)


def test_samples_of_outputs_are_those_of_their_batch(llm, policy):
    output = llm.generate("so (", BRACKETS.clone(n=2), use_tqdm=False)[0]
    batch = policy.rollout("so (", BRACKETS.clone(n=2), use_tqdm=False)
    made, read = list(output_samples(output, 0, {}, None, {})), list(samples_of(batch))
    assert [each["forced"] for each in made] == [each["forced"] for each in read]


def test_logged_samples_are_made_again(policy, tmp_path):
    thinking_rollout(policy, log_to=tmp_path / "log.jsonl")
    lines = read_jsonl(tmp_path / "log.jsonl")
    assert any(any(line["forced"]) for line in lines)
    for report in replay(policy, lines):
        assert report.is_equal and report.num_tokens == 24


class Thinker:
    """Three turns that each open thinking."""

    def reset(self, seed):
        self.turn = 0
        return "so ("

    def step(self, action):
        self.turn += 1
        return Observation(" and (", 1.0, terminated=self.turn == 3)


def test_a_budget_of_an_episode_is_spent_over_its_turns(policy, tmp_path):
    params = BRACKETS.clone(seed=None, thinking_budget=None, max_tokens=12, logit_bias={10: -100.0})
    log = tmp_path / "episodes.jsonl"
    options = dict(env=Thinker, episode_thinking_budget=15, num_samples=4, seed=5, use_tqdm=False, log_to=log)
    batch = policy.rollout(None, params, **options)
    forced, turn = batch["masks", "forced"], batch["masks", "turn"]
    for row in range(4):
        num_thought = 0
        for number in range(3):
            own = turn[row] == number
            tokens, marks = batch["tokens", "full"][row][own].tolist(), forced[row][own].tolist()
            inside = tokens.index(11) if 11 in tokens else len(tokens)
            num_thought += inside
            assert marks == [place == inside and num_thought == 15 for place in range(len(tokens))]
        assert num_thought <= 15
    assert forced.any()
    assert not (forced & batch["masks", "all_assistant_mask"]).any()
    for report in replay(policy, read_jsonl(log)):
        assert report.is_equal
