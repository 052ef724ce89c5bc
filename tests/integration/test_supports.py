"""Supports through rollouts: a trainer that renormalises over them has the engine's processed log-probs."""

import asyncio
import json
import random

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from envs_adapters import Observation
from rollout_engine import (
    LLM,
    AsyncLLM,
    EngineConfig,
    RequestError,
    RolloutPolicy,
    SamplingParams,
    SpeculationConfig,
    concat,
    exact,
    minibatches,
    read_jsonl,
    to_jsonl,
)
from rollout_engine.base.support import Support
from rollout_engine.batches.jsonl import samples
from rollout_engine.testing import tiny_checkpoint

PROMPTS = [list(range(3, 40)), list(range(3, 40)) + [9, 8], [5, 6]]
KEPT = dict(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, return_support=True, logprobs_mode="processed", **KEPT)
OPTIONS = dict(num_threads=1, log_stats=False, max_model_len=512)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", std=0.05))


@pytest.fixture(scope="module")
def trainer(checkpoint):
    return exact.enable(AutoModelForCausalLM.from_pretrained(checkpoint))


@pytest.fixture(scope="module")
def policy(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as made:
        yield made


def rollout(policy, params=PARAMS, **options):
    return policy.rollout(PROMPTS, params, **dict(num_samples=2, seed=1, use_tqdm=False) | options)


def supports(batch):
    return batch.get("support").tolist()


def assert_exact(trainer, batch, **options):
    with torch.no_grad():
        report = exact.check(batch, exact.token_logprobs(trainer, batch, **options))
    assert report.is_exact and report.num_tokens == int(batch["masks", "all_assistant_mask"].sum()) > 0, str(report)


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param(dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0), marks=pytest.mark.slow),
        pytest.param(dict(temperature=0.0), marks=pytest.mark.slow),
        dict(top_k=0, top_p=1.0, min_p=0.0, allowed_token_ids=[7, 8, 9, 100], min_tokens=3, ignore_eos=False),
        pytest.param(dict(bad_words=["a", "bc"], top_k=0), marks=pytest.mark.slow),
        pytest.param(dict(structured_outputs={"regex": "[a-h]{3,}"}, ignore_eos=False), marks=pytest.mark.slow),
        dict(structured_outputs={"regex": "[a-h]{3,}"}, ignore_eos=False, top_k=0, top_p=1.0, min_p=0.0),
    ],
)
def test_a_trainer_has_the_engines_processed_log_probs(policy, trainer, layout, more):
    batch = rollout(policy, PARAMS.clone(**more), layout=layout)
    assert_exact(trainer, batch)
    assert_exact(trainer, batch, support=batch["support"])
    ids, real = batch["tokens", "full"].clone(), batch.get(("masks", "all_attention_mask"))
    given = dict(attention_mask=real) if layout == "padded" else dict(cu_seqlens=batch["cu_seqlens"])
    with torch.no_grad():
        found = exact.token_logprobs(
            trainer, ids, **given, temperature=PARAMS.clone(**more).temperature, support=supports(batch)
        )
    mask = batch["masks", "all_assistant_mask"][:, 1:]
    assert torch.equal(found[mask], batch["log_probs", "full"][:, 1:][mask])


@pytest.mark.slow
def test_supports_are_the_same_alone_drafted_forked_and_in_another_process(checkpoint):
    params = PARAMS.clone(seed=5, n=2, logprobs=0, max_tokens=20)
    with LLM(checkpoint, **OPTIONS) as plain:
        expected = plain.generate(PROMPTS, params, use_tqdm=False)
    with LLM(checkpoint, **OPTIONS, speculation=SpeculationConfig()) as drafting:
        drafting.llm_engine.frontend.client.driver.core._scheduler.speculator._costs.of = lambda num_rows: 1.0
        drafted = [drafting.generate(PROMPTS, params, use_tqdm=False) for _ in range(2)][1]
        assert drafting.llm_engine.frontend.client.driver.core.stats.drafts.num_accepted

    async def exchange():
        engine = AsyncLLM.from_config(EngineConfig(model=checkpoint, **OPTIONS))
        try:
            found = []
            for index, prompt in enumerate(PROMPTS):
                parts = {0: [], 1: []}
                kinds = params.clone(output_kind="delta")
                async for output in engine.generate({"prompt_token_ids": prompt}, kinds, str(index)):
                    for sample in output.outputs:
                        parts[sample.index] += Support(*sample.support).lists()
                found += parts.values()
            return found
        finally:
            engine.shutdown()

    ours = [Support(*sample.support).lists() for output in expected for sample in output.outputs]
    assert [Support(*sample.support).lists() for output in drafted for sample in output.outputs] == ours
    assert asyncio.run(exchange()) == ours
    assert all(1 <= len(ids) <= 20 for rows in ours for ids in rows)


def test_batches_of_rollouts_are_joined_divided_and_written_with_them(policy, trainer, tmp_path):
    first = rollout(policy, log_to=tmp_path / "log.jsonl")
    second = rollout(policy, seed=4)
    both = concat([first, second])
    expected = [each.lists() for each in supports(first) + supports(second)]
    assert [each.lists() for each in supports(both)] == expected
    assert_exact(trainer, both)
    parts = list(minibatches(both, 5, generator=torch.Generator().manual_seed(0)))
    for part in parts:
        assert_exact(trainer, part)
    packed = rollout(policy, layout="packed")
    assert [each.lists() for each in supports(packed)] == expected[:6]
    for part in minibatches(packed, 4):
        assert_exact(trainer, part)
    to_jsonl(both, tmp_path / "rollouts.jsonl")
    written = read_jsonl(tmp_path / "rollouts.jsonl")
    assert [sample["support"] for sample in written] == expected
    logged = sorted(read_jsonl(tmp_path / "log.jsonl"), key=lambda s: (s["group_id"], s["sample_index"]))
    assert [sample["support"] for sample in logged] == expected[:6]
    line = json.loads((tmp_path / "rollouts.jsonl").read_text().splitlines()[0])
    (tmp_path / "short.jsonl").write_text(json.dumps(line | {"support": line["support"][1:]}) + "\n")
    with pytest.raises(RequestError, match="It has 12 tokens, and 11 support"):
        read_jsonl(tmp_path / "short.jsonl")
    with pytest.raises(RequestError, match=r"batches\[1\]\['support'\]=None"):
        concat([first, second.exclude("support")])


class Telling:
    """Three turns, with an answer of a length of its own after each."""

    def reset(self, seed):
        self.random, self.left = random.Random(seed), 3
        return self._words()

    def step(self, action):
        self.left -= 1
        return Observation(self._words(), reward=1.0, terminated=self.left == 0)

    def _words(self):
        return "".join(self.random.choices("abcdefgh ", k=self.random.randint(15, 25)))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_an_episode_has_those_of_its_turns_and_empty_rows_between(policy, trainer, layout):
    batch = policy.rollout(
        None, PARAMS.clone(max_tokens=7), env=Telling, num_episodes=2, num_samples=2, use_tqdm=False, layout=layout
    )
    assert int(batch["num_turns"].min()) == 3
    assert_exact(trainer, batch)
    turns = [sample["turns"] for sample in samples(batch)]
    for row, each in zip(turns, supports(batch), strict=True):
        assert [turn < 0 for turn in row] == [not ids for ids in each.lists()]


def test_gradients_are_those_of_a_softmax_of_the_support(policy, checkpoint):
    batch = rollout(policy)
    ours, theirs = (exact.enable(AutoModelForCausalLM.from_pretrained(checkpoint)) for _ in range(2))
    sampled = batch["masks", "all_assistant_mask"][:, 1:]
    exact.token_logprobs(ours, batch)[sampled].sum().backward()
    logits = theirs(input_ids=batch["tokens", "full"]).logits[:, :-1] / 0.7
    is_in = torch.zeros(logits.shape, dtype=torch.bool)
    for row, (first, each) in enumerate(zip(batch["num_prompt_tokens"].tolist(), supports(batch), strict=True)):
        for place, ids in enumerate(each.lists()):
            is_in[row, first - 1 + place, ids] = True
    is_in[~sampled] = True
    logprobs = logits.masked_fill(~is_in, -torch.inf).log_softmax(-1)
    logprobs.gather(-1, batch["tokens", "full"][:, 1:, None])[..., 0][sampled].sum().backward()
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-4, atol=1e-5)


def test_what_is_compared_otherwise_is_told_by_its_cause(policy, trainer, recwarn):
    batch = rollout(policy)
    ids, real = batch["tokens", "full"].clone(), batch["masks", "all_attention_mask"]
    with torch.no_grad():
        whole = exact.token_logprobs(trainer, ids, real, temperature=0.7)
        report = exact.check(batch, whole)
        assert not report.is_exact and "pass support=batch['support']" in report.cause
        tempered = rollout(policy, PARAMS.clone(logprobs_mode="tempered"))
        assert_exact(trainer, tempered)
        renormalised = exact.token_logprobs(trainer, tempered, support=tempered["support"])
        assert "logprobs_mode='processed', or call" in exact.check(tempered, renormalised).cause
        penalised = rollout(policy, PARAMS.clone(repetition_penalty=2.0))
        with pytest.raises(
            RequestError, match="temperature=None.*or of edited logits.*truncation .*return_support=True"
        ):
            exact.token_logprobs(trainer, penalised)
        report = exact.check(
            penalised, exact.token_logprobs(trainer, penalised, temperature=0.7, support=penalised["support"])
        )
        assert not report.is_exact and "no penalties or bias" in report.cause


def test_supports_that_do_not_fit_are_refused(policy, trainer):
    batch = rollout(policy)
    given = supports(batch)
    ids, real = batch["tokens", "full"].clone(), batch["masks", "all_attention_mask"]

    def refused(support, message):
        with pytest.raises(RequestError, match=message):
            exact.token_logprobs(trainer, ids, real, temperature=0.7, support=support)

    refused(True, "support='bool' is not allowed: must be batch")
    refused(given[1:], "support='5 of them' is not allowed: must be one for each of 6 sequences")
    refused(given[::-1], r"support\[0\]='without token \d+, \d+' .*hold the tokens that were drawn")
    refused([*given[:5], [[3]]], r"support\[5\]='list'")
    refused([*given[:5], Support.of([[259]])], r"support\[5\]\[0\]=259 .*in \[0, 259\)")
    refused([*given[:5], Support.of([[]] * 99)], r"support\[5\]='99 rows' .*at most 14")
    with pytest.raises(RequestError, match="must be with 'support'"):
        exact.token_logprobs(trainer, batch.exclude("support"))


def test_one_row_may_have_another_support_where_sequences_begin_alike(trainer):
    ids, others = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]]), Support.of([[1, 7], [8, 9, 10]])
    given = [Support.of([[3, 7, 9], [8, 30]]), others]
    with torch.no_grad():
        both = exact.token_logprobs(trainer, ids, support=given)
        alone = [exact.token_logprobs(trainer, ids[[row]], support=given[row : row + 1]) for row in range(2)]
    assert torch.equal(both, torch.cat(alone)) and both[0, 1] != both[1, 1]


def test_a_batch_keeps_them_as_a_plain_tensordict_and_on_its_way_to_a_file(policy, trainer, tmp_path):
    batch = rollout(policy)
    plain = batch.to_tensordict()
    assert isinstance(plain, TensorDict) and np.array_equal(supports(plain)[0].ids, supports(batch)[0].ids)
    torch.save(batch, tmp_path / "batch.pt")
    back = torch.load(tmp_path / "batch.pt", weights_only=False)
    assert [each.lists() for each in supports(back)] == [each.lists() for each in supports(batch)]


def test_who_does_not_ask_gets_no_key_and_one_that_may_not_fit_is_refused(policy):
    assert "support" not in rollout(policy, PARAMS.clone(return_support=False)).keys()
    with pytest.raises(RequestError, match="return_support=True is not allowed: must be for at most"):
        rollout(policy, PARAMS.clone(max_tokens=400, top_k=258), num_samples=4096)
