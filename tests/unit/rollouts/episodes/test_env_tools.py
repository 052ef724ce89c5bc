"""Calls of tools are answered, whatever a policy writes."""

import asyncio
import re

import pytest

from envs_adapters.base import Action, BrokenCall, Observation, ToolCall
from rollout_engine.base.errors import ConfigError
from rollout_engine.rollouts.episodes.env_calls import EnvFailure
from rollout_engine.rollouts.episodes.tool_functions import call_tool, tool_functions, tool_schemas


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def fail(text: str) -> str:
    """Fails.

    Args:
        text: a text
    """
    raise ValueError(text)


async def look(text: str) -> dict:
    """Looks something up.

    Args:
        text: a text
    """
    await asyncio.sleep(0)
    return {"found": text}


SCHEMA = {"type": "function", "function": {"name": "submit", "description": "Submit.", "parameters": {}}}
FUNCTIONS = tool_functions([add, fail, look, SCHEMA])


@pytest.mark.parametrize(
    "name, arguments, text",
    [
        ("add", {"a": 1, "b": 2}, "3"),
        ("add", {"a": 1}, "2"),
        ("add", {}, "Error: add: .*`a`.*"),
        ("add", {"a": "x"}, "Error: add: Expected `int`, got `str` - at `.*"),
        ("add", {"a": 1, "c": 2}, "Error: add: .*c.*"),
        ("fail", {"text": "boom"}, "Error: ValueError: boom"),
        ("ad", {}, "Error: Unknown tool 'ad'. Did you mean 'add'[?]"),
    ],
)
def test_a_call_has_a_text(name, arguments, text):
    assert re.fullmatch(text, call_tool(FUNCTIONS, ToolCall(name, arguments)))


def test_async_functions_are_awaited():
    assert asyncio.run(call_tool(FUNCTIONS, ToolCall("look", {"text": "ä"}))) == '{"found": "ä"}'


def test_schemas_come_from_functions_and_are_kept_where_given():
    added, _, _, kept = tool_schemas([add, fail, look, SCHEMA], FUNCTIONS)
    assert kept == SCHEMA
    assert added["function"]["name"] == "add" and added["function"]["parameters"]["required"] == ["a"]


@pytest.mark.parametrize("tools, reason", [([len], "docstring|type hint"), ([add, add], "Two tools"), ([5], "tools=5")])
def test_tools_are_refused(tools, reason):
    with pytest.raises(ConfigError, match=reason):
        tool_functions(tools)


class Calculator:
    """Its tools are two functions and a schema."""

    def __init__(self):
        self.tools = [add, look, SCHEMA]

    def reset(self, seed):
        return "Add."

    def step(self, action):
        assert not any(call.name == "add" for call in action.tool_calls)
        return Observation("Done.", reward=2.0, terminated=True, info={"calls": len(action.tool_calls)})


def test_calls_of_functions_are_made_without_a_step(run_env):
    env = run_env(Calculator)
    began = env.reset()
    assert [tool["function"]["name"] for tool in began.tools] == ["add", "look", "submit"]
    assert began.functions == ["add", "look"]
    observation = env.step(Action("", tool_calls=[ToolCall("add", {"a": 1}), ToolCall("look", {"text": "b"})]))
    assert [message["role"] for message in observation.messages] == ["tool"] * 2
    assert [message["content"] for message in observation.messages] == ["2", '{"found": "b"}']
    assert (observation.reward, observation.terminated) == ({0: 0.0}, False)
    assert env.step(Action("", broken_calls=[BrokenCall("{", "not JSON")])).messages == "Done."


@pytest.mark.parametrize("calls", [[], [ToolCall("submit", {})]])
def test_an_action_without_calls_of_functions_is_stepped(run_env, calls):
    env = run_env(Calculator)
    env.reset()
    assert env.step(Action("", tool_calls=calls)).info == {"calls": len(calls)}


class Untyped(Calculator):
    def __init__(self):
        self.tools = [lambda a: a]


def test_a_function_that_cannot_be_a_tool_ends_the_episode_with_the_reason(run_env):
    failure = run_env(Untyped).reset()
    assert isinstance(failure, EnvFailure) and "cannot be a tool" in failure.reason
