"""Episodes over real engines: bits of every turn, weight updates in the middle, KV found again."""

import random
import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from envs_adapters import Observation
from rollout_engine import exact
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.faces.async_llm import AsyncLLM
from rollout_engine.rollouts.policy import RolloutPolicy
from rollout_engine.testing import tiny_checkpoint
from rollout_engine.testing.spelling import spelled_token, spelling_state_dict

OPTIONS = {"dtype": "float32", "num_kv_blocks": 4096, "max_model_len": 512, "num_threads": 1}
PARAMS = SamplingParams(max_tokens=12)


class Telling:
    """Eight turns; says something of a length of its own after each."""

    def reset(self, seed):
        self.random, self.left = random.Random(seed), 8
        return self._words()

    def step(self, action):
        self.left -= 1
        return Observation(self._words(), reward=self.random.random(), terminated=self.left == 0)

    def _words(self):
        return "".join(self.random.choices("abcdefgh ", k=self.random.randint(15, 25)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint)


@pytest.fixture(
    params=["in process", *(pytest.param(name, marks=pytest.mark.slow) for name in ("own process", "fleet"))]
)
def policy(request, checkpoint):
    if request.param == "own process":
        made = RolloutPolicy(AsyncLLM(checkpoint, **OPTIONS))
    else:
        made = RolloutPolicy.from_pretrained(checkpoint, num_replicas=1 + (request.param == "fleet"), **OPTIONS)
    with made:
        yield made
        assert made.frontend.num_open() == 0
        assert made.get_num_unfinished_requests() == 0


def test_every_turn_has_the_trainers_bits(policy, model):
    trainer = exact.enable(model)
    batch = policy.rollout(None, PARAMS, env=Telling, num_episodes=6, num_samples=2, seed=1, use_tqdm=False)
    assert batch["num_turns"].tolist() == [8] * 12
    new = exact.token_logprobs(trainer, batch["tokens", "full"], batch["masks", "all_attention_mask"])
    assert exact.check(batch, new).is_exact
    assert torch.equal(policy.score(batch), batch["log_probs", "full"])
    again = policy.rollout(None, PARAMS, env=Telling, num_episodes=6, num_samples=2, seed=1, use_tqdm=False)
    assert torch.equal(again["tokens", "full"], batch["tokens", "full"])


def test_every_token_spells_the_version_it_is_said_to_have(policy, model):
    weights = [spelling_state_dict(model, version) for version in range(1, 5)]
    policy.update_weights(weights[0])
    greedy, ended = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), threading.Event()

    class Unhurried(Telling):
        def step(self, action):
            time.sleep(0.02)
            return super().step(action)

    def update():
        for each in weights[1:]:
            ended.wait(0.15)
            policy.update_weights(each)

    trainer = threading.Thread(target=update)
    trainer.start()
    try:
        batch = policy.rollout(None, greedy, env=Unhurried, num_episodes=16, use_tqdm=False)
    finally:
        ended.set()
        trainer.join()
    sampled = batch["masks", "all_assistant_mask"]
    versions, tokens = batch["policy_version"][sampled].tolist(), batch["tokens", "full"][sampled].tolist()
    assert tokens == [spelled_token(version) for version in versions]
    assert len(set(versions)) > 1
    assert (batch["policy_version"][~sampled] == -1).all()


def test_earlier_turns_are_not_computed_again(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as policy:
        before = policy.get_metrics().core.counters.num_prompt_tokens_computed
        batch = policy.rollout(None, PARAMS, env=Telling, num_episodes=64, seed=1, use_tqdm=False)
        computed = policy.get_metrics().core.counters.num_prompt_tokens_computed - before
    assert batch["num_turns"].sum() == 64 * 8
    glue = int((batch["masks", "all_attention_mask"] & ~batch["masks", "all_assistant_mask"]).sum())
    needed = glue + 64 * 7  # the last token of an answer has no KV before the next turn
    assert needed <= computed <= 1.05 * needed
