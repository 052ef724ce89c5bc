"""Agents as they are described: commands are split and found, wrong arguments are refused at once."""

import sys

import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.rollouts.agents.agent import Agent, as_agent


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent.py").write_text("")
    (tmp_path / "settings.toml").write_text("")
    return str(tmp_path / "my_agent.py")


def test_a_script_is_run_by_this_python(script):
    assert Agent("my_agent.py --fast 'two words'").command == [sys.executable, script, "--fast", "two words"]


def test_words_that_name_files_become_absolute(script, tmp_path):
    command = Agent("sh my_agent.py settings.toml other.toml").command
    assert command == ["sh", script, str(tmp_path / "settings.toml"), "other.toml"]


def test_the_words_of_a_list_stay_as_they_are(script):
    agent = Agent(["sh", "my_agent.py", "$HOME; ls"])
    assert agent.command == ["sh", "my_agent.py", "$HOME; ls"]
    assert repr(agent) == "Agent(\"sh my_agent.py '$HOME; ls'\")"


def test_a_name_with_a_prefix_is_an_agent(script):
    assert as_agent("agent:my_agent.py").command == [sys.executable, script]
    given = Agent("sh")
    assert as_agent(given) is given
    assert as_agent("reasoning_gym:spell_backward") is None and as_agent(dict) is None


def test_a_function_is_named():
    def my_agent(session, task):
        """Nothing."""

    assert repr(Agent(my_agent)).endswith("my_agent')")


@pytest.mark.parametrize(
    "program, options, said",
    [
        ("", {}, "a command, such as"),
        ("'open", {}, "No closing quotation"),
        ("absent.py", {}, "a script that exists; the current directory is"),
        ("no-such-program-here", {}, "a program that can be run"),
        ([], {}, "its words in a list"),
        (["sh", 1], {}, "its words in a list"),
        (7, {}, "or a function"),
        ("sh", {"timeout": 0}, "timeout"),
        ("sh", {"timeout": float("inf")}, "timeout"),
        ("sh", {"timeout": True}, "timeout"),
        ("sh", {"cwd": "absent"}, "a directory that exists"),
        ("sh", {"env": {"A=B": "1"}}, "no '='"),
        ("sh", {"env": {"A": 1}}, "env['A']"),
        ("sh", {"max_output_bytes": 0}, "max_output_bytes"),
        ("sh", {"reward": 1.0}, "a function of any of task, output"),
        ("sh", {"reward": lambda outputs: 1.0}, "Did you mean 'output'"),
        ("sh", {"reward": lambda task, /: 1.0}, "needs 'task', which it does not get"),
        (print, {"env": {"A": "1"}}, "a function runs in this process"),
    ],
)
def test_wrong_arguments_are_refused(program, options, said):
    with pytest.raises(RequestError) as refusal:
        Agent(program, **options)
    assert said in str(refusal.value)


@pytest.mark.parametrize("reward", [lambda **facts: 1.0, lambda task, weight=2.0: weight, max])
def test_reward_functions_of_any_form_are_taken(reward):
    assert Agent("sh", reward=reward).reward is reward


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ("agent:absent.py --fast", "env='agent:absent.py --fast' is not allowed: must be a script that exists"),
        ("agent:no-such-program-here", "env='agent:no-such-program-here' is not allowed: must be a program that can"),
        ("agent:", "env='agent:' is not allowed: must be a command"),
    ],
)
def test_errors_show_what_was_given_as_env(env, said):
    with pytest.raises(RequestError) as refusal:
        as_agent(env)
    assert str(refusal.value).startswith(said) and refusal.value.field == "env"
    with pytest.raises(RequestError, match="^program="):
        Agent(env.removeprefix("agent:"))
