"""A reward model is a reward function: of rollouts, of a trainer's calls, and of one's own."""

import numpy as np
import pytest

from rollout_engine import LLM, ConfigError, RequestError, RewardModel, RolloutPolicy, SamplingParams
from rollout_engine.testing import random_adapter, tiny_checkpoint, tiny_model

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("reward"), head="sequence", num_labels=1)


@pytest.fixture(scope="module")
def reward(checkpoint):
    with RewardModel(checkpoint, log_stats=False) as model:
        yield model


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = tiny_checkpoint(tmp_path_factory.mktemp("policy"), seed=1)
    with RolloutPolicy.from_pretrained(path, log_stats=False) as policy:
        yield policy


def reward_of(reward, prompt):
    (output,) = reward.llm.reward([prompt], use_tqdm=False)
    return float(output.outputs.data[0])


def test_texts_and_conversations_are_rewarded_with_their_completions(reward):
    assert reward(["a", "b"], ["x", "yz"], foo=[1, 2]) == [reward_of(reward, "ax"), reward_of(reward, "byz")]
    said = {"role": "assistant", "content": "ho"}
    whole = reward_of(reward, {"messages": [*CHAT, said]})
    assert reward(prompts=[CHAT, {"messages": CHAT}], completions=["ho", [said]]) == [whole, whole]
    assert reward([[5, 6]], ["anything"], [[7]]) == [reward_of(reward, [5, 6, 7])]
    assert reward([], []) == []


def test_a_rollout_is_rewarded_by_it(reward, policy):
    params = SamplingParams(max_tokens=6, seed=3)
    batch = policy.rollout(["hello", "there"], params, num_samples=3, reward_fn=reward)
    texts = [p + c for p, c in zip(batch["text", "prompt"], batch["text", "response"], strict=True)]
    assert batch["next", "reward"][:, 0].tolist() == pytest.approx([reward_of(reward, text) for text in texts])


def test_an_adapter_of_the_policy_is_none_of_the_reward_model(reward, policy):
    policy.add_lora(random_adapter(tiny_model(), "math"))
    params = SamplingParams(max_tokens=6, seed=3)
    prompts = [{"prompt": "hello", "lora_request": "math"}]
    batch = policy.rollout(prompts, params, reward_fn=reward, use_tqdm=False)
    (text,) = batch["text", "response"]
    assert batch["next", "reward"][:, 0].tolist() == pytest.approx([reward_of(reward, "hello" + text)])


def test_a_rollout_of_conversations_is_rewarded_beside_other_functions(reward, policy):
    def length(completions):
        return [float(len(completion[0]["content"])) for completion in completions]

    params = SamplingParams(max_tokens=6, seed=3)
    batch = policy.rollout([CHAT], params, num_samples=2, reward_fn=[reward, length], reward_weights=[1.0, 0.0])
    texts = batch["text", "response"]
    wanted = [reward_of(reward, [*CHAT, {"role": "assistant", "content": text}]) for text in texts]
    assert batch["next", "reward"][:, 0].tolist() == pytest.approx(wanted)


def test_it_has_the_name_of_its_directory(reward, checkpoint):
    assert reward.__name__ == checkpoint.name


def test_prompts_that_it_cannot_read_are_refused(reward):
    with pytest.raises(RequestError, match="token ids with completion_ids"):
        reward([[5, 6]], ["x"])
    for prompt in ("a", CHAT):
        with pytest.raises(RequestError, match=r"prompts\[1\]=.* is not allowed: .* The completion is None"):
            reward(["a", prompt], ["x", None])
    with pytest.raises(RequestError, match="completions='a list of 1' is not allowed: must be 2"):
        reward(["a", "b"], ["x"])


def test_long_answers_are_refused_or_cut_at_their_beginning(checkpoint):
    with RewardModel(checkpoint, max_model_len=16, truncate_prompt_tokens=-1, log_stats=False) as cut:
        assert cut(["a" * 30], ["b" * 4]) == [reward_of(cut, "a" * 12 + "b" * 4)]
    with RewardModel(checkpoint, max_model_len=16, log_stats=False) as strict:
        with pytest.raises(RequestError, match="at most max_model_len=16 tokens"):
            strict(["a" * 30], ["b"])


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "options, match",
    [
        ({}, r"no classification head \(no score.weight\)"),
        (dict(head="sequence", num_labels=2), "Its head has 2 labels"),
        (dict(head="token", num_labels=1), "a head for tokens' is not allowed: must be a checkpoint with a head for"),
    ],
)
def test_a_checkpoint_that_gives_no_single_reward_is_refused_at_the_start(tmp_path, options, match):
    with pytest.raises(ConfigError, match=match):
        RewardModel(tiny_checkpoint(tmp_path, **options))


def test_a_module_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match="save_pretrained"):
        RewardModel(tiny_model())


def test_process_rewards_come_from_a_head_for_tokens(tmp_path):
    path = tiny_checkpoint(tmp_path, head="token", num_labels=1)
    with LLM(path, log_stats=False) as llm:
        every, some = (llm.reward([[5, 9, 6, 9]], step_token_ids=ids, use_tqdm=False)[0] for ids in (None, [9]))
    assert every.outputs.data.shape == (4,) and np.array_equal(some.outputs.data, every.outputs.data[[1, 3]])
