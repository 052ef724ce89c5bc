"""Routed experts through rollouts, own processes and fleets, and their replay in `score` and on the trainer."""

import asyncio
import os
import random
import signal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from envs_adapters import Observation
from rollout_engine import (
    LLM,
    AsyncLLM,
    EngineConfig,
    RequestError,
    RolloutPolicy,
    SamplingParams,
    concat,
    exact,
    minibatches,
    routing,
    to_jsonl,
)
from rollout_engine.model.modules.routers import routers_of
from rollout_engine.testing import tiny_checkpoint
from rollout_engine.testing.architectures import SIZES

PROMPTS = [list(range(3, 40)), list(range(3, 40)) + [9, 8], [5, 6]]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, return_routed_experts=True)
OPTIONS = dict(num_threads=1, log_stats=False, max_model_len=512)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("mixture"), "qwen3_moe", **SIZES["qwen3_moe"]))


@pytest.fixture
def trainer(checkpoint):
    return exact.enable(AutoModelForCausalLM.from_pretrained(checkpoint))


@pytest.fixture(scope="module")
def policy(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, **OPTIONS) as made:
        yield made


def truth(trainer, token_ids):
    """The trainer's experts of all tokens but the last, int16 [n - 1, L, k]."""
    with routing.record(trainer) as found, torch.no_grad():
        trainer(input_ids=torch.tensor([token_ids]))
    return found.routed_experts[:-1]


def with_other_routers(trainer):
    """The same model with routers that choose otherwise."""
    with torch.no_grad():
        for index, router in enumerate(routers_of(trainer)):
            noise = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(index))
            router.weight.copy_(noise * router.weight.std())
    return trainer


def logprobs_of(trainer, batch, **options):
    """float32 [B, T - 1], detached; the tokens are a copy without a note of their rollout."""
    ids = batch["tokens", "full"].clone()
    return exact.token_logprobs(trainer, ids, batch["masks", "all_attention_mask"], **options).detach()


def test_a_rollout_has_the_experts_of_every_token_but_the_last(policy, trainer):
    batch = policy.rollout(PROMPTS, PARAMS, num_samples=2, use_tqdm=False)
    experts, real = batch["routed_experts"], batch["masks", "all_attention_mask"]
    assert experts.dtype == torch.int16 and experts.shape == (*real.shape, 2, 2)
    for ids, mask, rows in zip(batch["tokens", "full"], real, experts, strict=True):
        num = int(mask.sum())
        assert torch.equal(rows[: num - 1], truth(trainer, ids[:num].tolist()))
        assert (rows[num - 1 :] == -1).all()


def test_on_policy_a_replay_changes_no_bit_and_off_policy_it_brings_the_rollouts_experts_back(policy, trainer):
    batch = policy.rollout(PROMPTS, PARAMS, num_samples=2, use_tqdm=False)
    sampled = batch["masks", "all_assistant_mask"][:, 1:]
    experts = batch["routed_experts"]
    found = logprobs_of(trainer, batch, routed_experts=experts)
    assert torch.equal(found[sampled], batch["log_probs", "full"][:, 1:][sampled])
    moved = with_other_routers(trainer)
    plain, replayed = logprobs_of(moved, batch), logprobs_of(moved, batch, routed_experts=experts)
    assert not torch.equal(plain[sampled], replayed[sampled])
    with routing.replay(moved, experts), routing.record(moved) as chosen, torch.no_grad():
        moved(input_ids=batch["tokens", "full"])
    assert not routing.flipped(chosen.routed_experts.view_as(experts), experts).any()


def test_score_replays_with_the_bits_of_the_trainer(policy, trainer, checkpoint):
    batch = policy.rollout(PROMPTS, PARAMS, num_samples=2, use_tqdm=False)
    assert torch.equal(policy.score(batch, replay_routing=True), batch["log_probs", "full"])
    moved = with_other_routers(trainer)
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as other:
        other.update_weights(moved)
        found = other.score(batch, replay_routing=True)
        assert not torch.equal(found, other.score(batch))
    mask = batch["masks", "all_assistant_mask"][:, 1:]
    expected = logprobs_of(moved, batch, routed_experts=batch["routed_experts"])
    assert torch.equal(found[:, 1:][mask], expected[mask])


@pytest.mark.parametrize(
    "given, message",
    [
        ([], r"routed_experts='a list of 0' is not allowed: must be one for each of 1 pairs"),
        ([np.zeros((9, 2, 2), int)], r"routed_experts\[0\]='int64 \[9, 2, 2\]' .*integers \[up to 4, 2, 2\]"),
        ([np.zeros((4, 3, 2), int)], r"routed_experts\[0\]='int64 \[4, 3, 2\]'"),
        ([np.full((4, 2, 2), 0.5)], r"routed_experts\[0\]='float64 \[4, 2, 2\]'"),
        ([np.array([[[0, 1], [2, 7]]])], r"routed_experts\[0\]\[0, 1\]=\[2, 7\] .*2 experts in \[0, 5\)"),
        ([None], r"routed_experts\[0\]=None .*must be an array of integers"),
        (
            [[[[0, 1], [2]]]],
            r"routed_experts\[0\]=\[\[\[0, 1\], \[2\]\]\] .*must be an array of integers",
        ),
        ([np.array([[[0, 0], [2, 1]]])], r"routed_experts\[0\]\[0, 0\]=\[0, 0\] .*2 different experts"),
    ],
)
def test_score_refuses_what_does_not_fit(llm, given, message):
    with pytest.raises(RequestError, match=message):
        llm.score([[3, 4]], [[5, 6, 7]], routed_experts=given)


def test_batches_of_rollouts_are_joined_divided_and_written_with_them(policy, tmp_path):
    first, second = (policy.rollout([p], PARAMS, num_samples=2, use_tqdm=False, seed=4) for p in PROMPTS[1:])
    both = concat([first, second])
    assert both["routed_experts"].shape[:2] == both["tokens", "full"].shape
    assert torch.equal(both["routed_experts"][:2], first["routed_experts"])
    short = second["routed_experts"].shape[1]
    assert torch.equal(both["routed_experts"][2:, :short], second["routed_experts"])
    assert (both["routed_experts"][2:, short:] == -1).all()
    packed = policy.rollout(PROMPTS[1:2], PARAMS, num_samples=2, use_tqdm=False, seed=4, layout="packed")
    width = first["tokens", "full"].shape[1]
    assert torch.equal(packed["routed_experts"][0, :width], first["routed_experts"][0])
    parts = list(minibatches(packed, 1))
    assert torch.equal(parts[1]["routed_experts"][0], first["routed_experts"][1])
    to_jsonl(both, tmp_path / "rollouts.jsonl")
    assert len((tmp_path / "rollouts.jsonl").read_text().splitlines()) == 4


def test_a_replay_of_a_rollout_without_them_says_how_to_get_them(policy):
    batch = policy.rollout(PROMPTS[1:], {"max_tokens": 2}, use_tqdm=False)
    with pytest.raises(RequestError, match=r"\['routed_experts'\]. Roll out with .*return_routed_experts=True"):
        policy.score(batch, replay_routing=True)


def test_who_does_not_ask_gets_no_key(policy):
    assert "routed_experts" not in policy.rollout(PROMPTS, SamplingParams(max_tokens=2), use_tqdm=False).keys()


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


def test_an_episode_has_the_experts_of_all_its_turns_and_of_what_was_said_between(policy, trainer):
    params = SamplingParams(max_tokens=7, return_routed_experts=True)
    batch = policy.rollout(None, params, env=Telling, num_episodes=2, num_samples=2, use_tqdm=False)
    for ids, mask, rows in zip(
        batch["tokens", "full"], batch["masks", "all_attention_mask"], batch["routed_experts"], strict=True
    ):
        last = int((rows >= 0).all(-1).all(-1).sum())
        assert 0 < last < int(mask.sum())
        assert torch.equal(rows[:last], truth(trainer, ids[: last + 1].tolist()))
        assert int(batch["num_turns"].min()) == 3


def test_an_engine_in_its_own_process_returns_and_replays_the_same(checkpoint, llm):
    expected = llm.generate(PROMPTS, PARAMS.clone(seed=5, n=2, logprobs=0), use_tqdm=False)

    async def exchange():
        engine = AsyncLLM.from_config(EngineConfig(model=checkpoint, **OPTIONS))
        try:
            found = []
            for index, prompt in enumerate(PROMPTS):
                params = PARAMS.clone(seed=5, n=2, logprobs=0)
                async for output in engine.generate({"prompt_token_ids": prompt}, params, str(index)):
                    last = output
                found.append(last)
            pairs = [(output, sample) for output in found for sample in output.outputs]
            return found, await engine.score(
                [output.prompt_token_ids for output, _ in pairs],
                [sample.token_ids for _, sample in pairs],
                routed_experts=[sample.routed_experts for _, sample in pairs],
            )
        finally:
            engine.shutdown()

    found, scored = asyncio.run(exchange())
    theirs = [sample for output in found for sample in output.outputs]
    ours = [sample for output in expected for sample in output.outputs]
    for one, two, values in zip(theirs, ours, scored, strict=True):
        assert one.token_ids == two.token_ids
        assert np.array_equal(one.routed_experts, two.routed_experts) and one.routed_experts.dtype == np.uint8
        assert np.array_equal(values, two.logprobs)


@pytest.mark.slow
def test_a_request_that_goes_on_at_another_replica_has_each_row_once(checkpoint, trainer):
    params = SamplingParams(max_tokens=300, ignore_eos=True, return_routed_experts=True, n=2)

    async def exchange():
        engine = AsyncLLM(checkpoint, num_replicas=2, **OPTIONS)
        try:
            killed = False
            async for output in engine.generate({"prompt_token_ids": PROMPTS[0]}, params, "a"):
                if not killed and all(len(sample.token_ids) > 3 for sample in output.outputs):
                    replicas = await engine.replicas()
                    busy = next((each for each in replicas if each.num_unfinished_requests), replicas[0])
                    os.kill(busy.pid, signal.SIGKILL)
                    killed = True
            return output, killed
        finally:
            engine.shutdown()

    output, killed = asyncio.run(exchange())
    assert killed
    for sample in output.outputs:
        assert len(sample.token_ids) == 300
        expected = truth(trainer, output.prompt_token_ids + sample.token_ids)
        assert np.array_equal(sample.routed_experts, expected.numpy())
