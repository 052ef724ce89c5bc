"""Environments of the real verifiers 0.3, beside rollouts that verifiers makes with a client of its own."""

import asyncio
import logging
import signal
import threading
from pathlib import Path

import pytest

from envs_adapters import Action, ToolCall, make_env
from rollout_engine.base.errors import ConfigError
from rollout_engine.rollouts.episodes.env_calls import EnvCalls

pytest.importorskip("verifiers")

import verifiers as vf  # noqa: E402

if not hasattr(vf, "load_environment"):
    pytest.skip("this is verifiers 0.4", allow_module_level=True)

from verifiers.clients import Client  # noqa: E402
from verifiers.types import Response, ResponseMessage  # noqa: E402

NAME = "verifiers:verifiers-environments"


class Scripted(Client):
    """Says what it is told to."""

    def setup_client(self, config): ...
    async def to_native_tool(self, tool): ...
    async def to_native_prompt(self, messages): ...
    async def get_native_response(self, *arguments, **options): ...
    async def raise_from_native_response(self, response): ...
    async def from_native_response(self, response): ...
    async def close(self): ...

    async def get_response(self, prompt, model, sampling_args, tools=None, **options):
        said = ResponseMessage(content=self.client.pop(0), finish_reason="stop", is_truncated=False)
        return Response(id="", created=0, model=model, message=said)


@pytest.fixture(autouse=True)
def environments(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def play(spec, seed, *actions):
    async def episode():
        env = spec()
        try:
            told = [await env.reset(seed)]
            for action in actions:
                told.append(await env.step(Action(action) if isinstance(action, str) else action))
            return env, told
        finally:
            await env.close()

    return asyncio.run(episode())


def by_hand(kind, row, texts):
    env = vf.load_environment("verifiers-environments", kind=kind)
    return asyncio.run(env.run_rollout(dict(env.get_dataset()[row]), Scripted(list(texts)), "policy", {}))


@pytest.mark.parametrize(
    "kind, texts",
    [
        ("single", ["3"]),
        ("single", ["4"]),
        ("guessing", ["3"]),
        ("guessing", ["9", "3"]),
        ("guessing", ["9", "8", "7"]),
    ],
)
def test_turns_and_rewards_are_those_of_a_rollout_by_verifiers(kind, texts):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    spec = make_env(NAME, kind=kind)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert spec.is_single_turn == (kind == "single")
    _, told = play(spec, 6, *texts)
    own = by_hand(kind, 2, texts)
    ended = told[-1]
    assert ended.reward == own["reward"] and ended.info["metrics"] == own["metrics"]
    assert ended.info["stop_condition"] == own["stop_condition"] and ended.info["row"] == 2
    assert (ended.terminated, ended.truncated) == ((True, False) if len(texts) < 3 else (False, True))
    said = [message["content"] for observation in told[:-1] for message in observation.messages]
    assert said == ["Add.", "2 + 1?", *[f"{turn + 1} wrong." for turn in range(len(texts) - 1)]]


@pytest.mark.parametrize("placement", ["threads", "processes"])
def test_episodes_run_beside_the_engine(placement):
    came = threading.Event()
    running = EnvCalls(make_env(NAME, kind="guessing", placement=placement, num_workers=1), came.set)
    told: dict[int, list] = {key: [] for key in range(4)}
    try:
        for key in told:
            running.reset(key, key)
        while not all(each and getattr(each[-1], "terminated", False) for each in told.values()):
            assert came.wait(240)
            came.clear()
            for key, result in running.take():
                told[key].append(result)
                if len(told[key]) == 1:
                    running.step(key, Action("9"))
                elif not result.terminated:
                    running.step(key, Action(str(key + 1)))
        for key in told:
            running.close(key)
    finally:
        running.end()
    assert [each[-1].reward for each in told.values()] == [{0: 1.5}] * 4


def test_tools_are_called_by_the_environment():
    call = Action("let me add", tool_calls=[ToolCall("add", {"a": 2, "b": 1}), ToolCall("add", {"a": 5, "c": 1})])
    env, told = play(make_env(NAME, kind="tools"), 2, call, "3")
    [tool] = env.tools
    assert tool["function"]["name"] == "add" and set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    first, second = told[1].messages
    assert (first["role"], first["content"], first["tool_call_id"]) == ("tool", "3", "call_1")
    assert "unexpected keyword argument" in second["content"]
    assert told[2].terminated and told[2].reward == 1.5
    assert told[2].info["metrics"]["add_calls"] == 2


def test_rows_are_the_first_ones_or_those_of_the_evaluation():
    _, told = play(make_env(NAME, max_tasks=2), 3, "2")
    assert told[-1].reward == 1.25 and told[-1].info["row"] == 1
    assert play(make_env(NAME, kind="evaluation"), 3, "4")[1][-1].reward == 1.25


def test_an_episode_may_be_left_early():
    env, _ = play(make_env(NAME, kind="guessing"), 0, "9")
    assert env._rollout.cancelled()


@pytest.mark.parametrize(
    "kind, message",
    [
        ("rewriting", "rewrote the conversation"),
        ("hurried", "asks for two answers at once"),
        ("broken", "ended before its first request: .*nothing works"),
        ("broken later", "failed: .*nothing works any more"),
    ],
)
def test_an_environment_that_fails_ends_its_episode(kind, message, caplog):
    caplog.set_level(logging.CRITICAL)
    with pytest.raises(ValueError, match=message):
        play(make_env(NAME, kind=kind), 0, "9")


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("verifiers:no-such-environment", {}, "Could not import 'no-such-environment'"),
        (NAME, {"kind": "none"}, "Failed to load environment .*: 'none'"),
        (NAME, {"kind": "group"}, "rewards groups as a whole"),
        (NAME, {"max_tasks": 0}, "at least 1"),
    ],
)
def test_what_does_not_fit_is_refused_before_an_episode_begins(name, options, message, caplog):
    caplog.set_level(logging.CRITICAL)
    with pytest.raises(ConfigError, match=message):
        make_env(name, **options)
