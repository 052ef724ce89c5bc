"""Environments of the real skyrl-gym, stepped by hand."""

import json

import pytest

from envs_adapters import Action, make_env
from rollout_engine.base.errors import ConfigError

pytest.importorskip("skyrl_gym")

import skyrl_gym  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{number} + 1?"}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"max_turns": 3},
    }
    for number in range(5)
]


class Echo(skyrl_gym.Env):
    """Says what it is told until it hears "end"; written as skyrl-gym's documentation says."""

    def __init__(self, env_config, extras):
        assert isinstance(env_config, DictConfig)
        self.suffix, self.cut = env_config.suffix, extras.get("cut")
        self.is_closed = False

    def init(self, prompt):
        return [{"role": "system", "content": "Echo."}, *prompt], {"rows": 1}

    def step(self, action):
        said = [{"role": "user", "content": action + self.suffix}]
        output = {"observations": said, "reward": 0.5, "done": action == "end", "metadata": {"said": action}}
        return output | ({"postprocessed_action": action[: self.cut]} if self.cut else {})

    def get_metrics(self):
        return {"echoes": 1}

    def close(self):
        self.is_closed = True


def test_an_answer_is_scored_by_the_package_itself():
    spec = make_env("skyrl_gym:gsm8k", rows=ROWS)
    assert spec.is_single_turn
    env = spec()
    assert env.reset(seed=7).messages == ROWS[2]["prompt"]
    right = env.step(Action("so it is #### 3"))
    assert (right.reward, right.terminated, right.truncated, right.messages) == (1.0, True, False, ())
    env.reset(seed=2)
    assert env.step(Action("so it is #### 4")).reward == 0.0
    env.close()


def test_turns_and_their_rewards_are_those_of_the_environment_stepped_by_hand():
    spec = make_env("skyrl_gym:gsm8k_multi_turn", rows=ROWS)
    assert not spec.is_single_turn
    env = spec()
    env.reset(seed=1)
    extras = {field: value for field, value in ROWS[1].items() if field != "prompt"}
    by_hand = skyrl_gym.make("gsm8k_multi_turn", env_config={}, extras=extras)
    by_hand.init(ROWS[1]["prompt"])
    for answer in ("no idea", "#### 7", "#### 2"):
        expected, observation = by_hand.step(answer), env.step(Action(answer))
        assert list(observation.messages) == expected["observations"]
        assert (observation.reward, observation.terminated) == (expected["reward"], expected["done"])
    assert observation.terminated and observation.info["metrics"] == {"steps": 3}


def test_a_limit_of_turns_overrides_that_of_the_rows():
    env = make_env("skyrl_gym:gsm8k_multi_turn", rows=ROWS, max_turns=1)()
    env.reset(seed=0)
    assert env.step(Action("no idea")).terminated


def test_rows_come_from_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    env = make_env("skyrl_gym:gsm8k", rows=path)()
    assert env.reset(seed=4).messages == ROWS[4]["prompt"]


def test_a_class_of_the_users_own_has_its_configuration_and_is_closed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "echo_of_the_test", type("Module", (), {"Echo": Echo}))
    spec = make_env("skyrl_gym:echo_of_the_test:Echo", rows=[{"prompt": "Hello."}], env_config={"suffix": "!"})
    env = spec()
    began = env.reset(seed=0)
    assert [message["content"] for message in began.messages] == ["Echo.", "Hello."]
    assert began.info == {"rows": 1}
    observation = env.step(Action("hm"))
    assert (observation.messages, observation.info) == ([{"role": "user", "content": "hm!"}], {"said": "hm"})
    assert env.step(Action("end")).info == {"said": "end", "metrics": {"echoes": 1}}
    env.close()
    assert env._env.is_closed


def test_an_answer_that_the_environment_replaces_is_an_error(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "echo_of_the_test", type("Module", (), {"Echo": Echo}))
    rows = [{"prompt": "Hello.", "cut": 2}]
    env = make_env("skyrl_gym:echo_of_the_test:Echo", rows=rows, env_config={"suffix": "!"})()
    env.reset(seed=0)
    assert env.step(Action("hm")).reward == 0.5
    with pytest.raises(ValueError, match="replaces the answer"):
        env.step(Action("hmm"))


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("gsm9k", {"rows": ROWS}, "Did you mean 'gsm8k'"),
        ("gsm8k", {}, "needs the option rows"),
        ("gsm8k", {"row": ROWS}, "Did you mean 'rows'"),
        ("gsm8k", {"rows": []}, "at least one dict"),
        ("gsm8k", {"rows": "/nowhere.jsonl"}, "No such file"),
        ("gsm8k", {"rows": [{"question": "?"}]}, r"rows\[0\]: the field 'prompt' is missing; there are 'question'"),
        ("gsm8k", {"rows": [{"prompt": "?"}]}, "refuses the first row"),
        ("gsm8k", {"rows": ROWS, "max_turns": 0}, "at least 1"),
        ("nowhere:Env", {"rows": ROWS}, "No module named 'nowhere'"),
    ],
)
def test_what_does_not_fit_is_refused_before_an_episode_begins(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_env(f"skyrl_gym:{name}", **options)


def test_a_broken_file_is_named_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "?"}\n{"prompt": \n')
    with pytest.raises(ConfigError, match=r"rows.jsonl, line 2: no JSON object"):
        make_env("skyrl_gym:gsm8k", rows=str(path))
