"""Arguments of rollouts over environments."""

import pytest

from rollout_engine.base.errors import ConfigError, LifecycleError, RequestError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.rollouts.policy import RolloutPolicy
from tests.unit.fake_engine import make_engine
from tests.unit.rollouts.episodes.playing import PARAMS, Counting, play


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_turns": 0}, "max_turns"),
        ({"num_episodes": 0}, "num_episodes"),
        ({"episode_timeout": -1}, "episode_timeout"),
        ({"on_rewrite": "ignore"}, "on_rewrite"),
        ({"tool_format": "morse"}, "tool_format"),
        ({"seats": {0: 3}}, "RolloutPolicy, or a function"),
        ({"env": Counting()}, "Give the class itself"),
        ({"columns": {"a": [1]}}, "absent with env="),
        ({"reward_fn": len}, "absent with env="),
        ({"tools": [{"name": "add"}]}, "list of functions"),
        ({"params": SamplingParams(seed=1)}, "rollout\\(seed="),
        ({"params": [PARAMS]}, "one for all turns"),
        ({"max_turnss": 3}, "max_turns"),
        ({"env": None, "max_turns": 3}, "max_turns= needs env="),
    ],
)
def test_arguments_that_do_not_fit_are_refused(policy, options, message):
    with pytest.raises(RequestError, match=message):
        play(policy, **options)


def test_prompts_and_an_environment_exclude_each_other(policy):
    with pytest.raises(RequestError, match="rollout\\(None, params, env=...\\)"):
        policy.rollout(["hello"], PARAMS, env=Counting, use_tqdm=False)


@pytest.mark.parametrize("name, meant", [("agnt:my_agent.py", "agent"), ("reasoning_gim:x", "reasoning_gym")])
def test_a_name_that_is_none_is_refused_before_the_prompts_beside_it(policy, name, meant):
    with pytest.raises(ConfigError, match=f"Did you mean '{meant}'"):
        policy.rollout(["hello"], PARAMS, env=name, use_tqdm=False)


def test_an_engine_without_a_tokenizer_is_refused():
    policy = RolloutPolicy(make_engine(None, max_model_len=64))
    with pytest.raises(LifecycleError, match="no tokenizer"):
        play(policy)


def test_an_environment_may_be_named(policy):
    pytest.importorskip("reasoning_gym")
    batch = play(policy, "reasoning_gym:spell_backward", num_episodes=2)
    assert batch["num_turns"].tolist() == [1, 1]
