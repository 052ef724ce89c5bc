"""Scores of sequences with pictures, in process, in a process of its own and over ranks: the sampled bits."""

import numpy as np
import pytest
import torch

from envs_adapters import Observation
from rollout_engine import LLM, LLMEngine, RequestError, RolloutPolicy, SamplingParams
from rollout_engine.process.process_client import ProcessClient
from rollout_engine.testing.tiny_pictures import FAMILIES, random_picture, tiny_vision_checkpoint

FAMILY = "qwen2_5_vl"
SHOWN = FAMILIES[FAMILY].picture
PARAMS = SamplingParams(max_tokens=6, n=2, logprobs=0, ignore_eos=True, seed=3)
OPTIONS = dict(num_kv_blocks=256, max_model_len=512, num_threads=1, dtype="float32")


def prompt_of(*seeds):
    pictures = [random_picture(seed, 40, 24 + 8 * (seed % 2)) for seed in seeds]
    return {"prompt": f"{SHOWN} then ".join(["Look:"] * (1 + len(seeds))), "multi_modal_data": {"image": pictures}}


PROMPTS = [prompt_of(1), prompt_of(2, 1), "No picture."]


class Album:
    """Shows a picture in each of two turns."""

    def reset(self, seed):
        self.turn = 0
        return [{"role": "user", "content": [{"type": "image", "image": random_picture(seed % 97)}]}]

    def step(self, action):
        self.turn += 1
        shown = [{"type": "image", "image": random_picture(self.turn, 24, 24)}]
        return Observation([{"role": "user", "content": shown}], 0.0, terminated=self.turn == 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_vision_checkpoint(tmp_path_factory.mktemp("model"), FAMILY)


def scored(llm):
    """(log-probs sampled, log-probs scored) of each sample."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    samples = [(output, sample) for output in outputs for sample in output.outputs]
    ids = [output.prompt_token_ids for output, _ in samples], [sample.token_ids for _, sample in samples]
    found = llm.score(*ids, pictures=[output.pictures for output, _ in samples])
    return [sample.logprobs for _, sample in samples], found


@pytest.mark.parametrize(
    "kind", ["here", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("process", "ranks"))]
)
def test_scores_are_the_sampled_log_probs(checkpoint, kind):
    ranks = dict(tensor_parallel_size=2) if kind == "ranks" else {}
    with LLM(str(checkpoint), log_stats=False, **OPTIONS, **ranks) as llm:
        sampled, found = scored(llm)
        config = llm.llm_engine.frontend.client.info.config
    if kind == "process":
        with LLMEngine.from_client(ProcessClient.start(config)) as engine:
            again, found = scored(LLM.from_engine(engine))
            np.testing.assert_array_equal(np.concatenate(again), np.concatenate(sampled))
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(sampled))


def test_a_policy_scores_rollouts_and_episodes_with_pictures(checkpoint):
    with RolloutPolicy.from_pretrained(str(checkpoint), **OPTIONS) as policy:
        params, options = SamplingParams(max_tokens=6), dict(seed=4, use_tqdm=False, num_samples=2)
        batches = [policy.rollout(PROMPTS, params, **options, layout=layout) for layout in ("padded", "packed")]
        batches.append(policy.rollout(None, params, env=Album, num_episodes=2, **options))
        assert [len(row) for row in batches[-1]["pictures"]] == [2] * 4
        for batch in batches:
            assert torch.equal(policy.score(batch), batch["log_probs", "full"])
        blind = batches[0].exclude("pictures")
        assert not torch.equal(policy.score(blind), batches[0]["log_probs", "full"])


def test_pictures_are_refused_with_the_reason(checkpoint):
    with LLM(str(checkpoint), log_stats=False, **OPTIONS) as llm:
        output = llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)[0]
    given = [output.prompt_token_ids], [output.outputs[0].token_ids]
    with LLM(str(checkpoint), log_stats=False, max_prompt_pictures=0, **OPTIONS) as llm:
        with pytest.raises(RequestError, match="max_prompt_pictures=0"):
            llm.score(*given, pictures=[output.pictures])
        assert len(llm.score(*given)[0]) == 6
