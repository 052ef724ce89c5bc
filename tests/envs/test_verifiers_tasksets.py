"""Tasksets of the real verifiers 0.4."""

import asyncio
import logging
from pathlib import Path

import pytest

from envs_adapters import Action, make_env
from rollout_engine.base.errors import ConfigError

pytest.importorskip("verifiers.v1")

import verifiers  # noqa: E402

if hasattr(verifiers, "load_environment"):
    pytest.skip("this is verifiers 0.3", allow_module_level=True)

import verifiers.v1 as vf  # noqa: E402
from verifiers.v1.graph import MessageNode  # noqa: E402
from verifiers.v1.trace import AgentInfo, Trace, TraceTask  # noqa: E402

from tests.envs.verifiers_taskset import AdditionConfig, AdditionTaskset  # noqa: E402


@pytest.fixture(autouse=True)
def taskset(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def play(spec, seed, text, num_tokens=2):
    async def episode():
        env = spec()
        began = await env.reset(seed)
        return began, await env.step(Action(text, [7] * num_tokens))

    return asyncio.run(episode())


def test_rewards_are_those_of_the_task_scored_by_hand():
    spec = make_env("verifiers:verifiers-taskset", size=3)
    assert spec.is_single_turn
    for seed, text in ((4, "2"), (4, "3"), (5, " 3 ")):
        began, ended = play(spec, seed, text)
        task = list(AdditionTaskset(AdditionConfig(id="verifiers-taskset")))[seed % 3]
        trace = Trace(task=TraceTask(type="", data=task.data), agent=AgentInfo(config=vf.AgentConfig()))
        trace.nodes.append(MessageNode(message=vf.AssistantMessage(content=text), sampled=True))
        asyncio.run(task.score(trace))
        assert [message["content"] for message in began] == ["Add.", task.data.prompt]
        assert (ended.reward, ended.terminated) == (trace.reward, True)
        assert ended.info["metrics"] == {"num_turns": 1.0} and ended.info["task"] == seed % 3


def test_a_task_sees_how_long_the_answer_is_and_its_own_hooks_run():
    spec = make_env("verifiers:verifiers_taskset", kind="Marked", max_tasks=2)
    _, ended = play(spec, 3, "2", num_tokens=9)
    assert ended.info["rewards"] == {"is_right": 2.0, "is_short": 0.0, "has_begun": 1.0}
    assert ended.info["task"] == 1 and ended.reward == 3.0


def test_a_reward_that_fails_ends_the_episode():
    with pytest.raises(vf.TaskError, match="no such key"):
        play(make_env("verifiers:verifiers_taskset", kind="Failing"), 0, "1")


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("no-such-taskset", {}, "there is no such taskset"),
        ("verifiers-taskset", {"sise": 3}, "Did you mean 'size'"),
        ("verifiers-taskset", {"size": "many"}, "refuses {'size': 'many'}"),
        ("verifiers-taskset", {"size": object()}, "must be plain data"),
        ("verifiers-taskset", {"size": 0}, "has no tasks"),
        ("verifiers-taskset", {"max_tasks": 0}, "at least 1"),
        ("verifiers-taskset", {"kind": "InSandbox"}, "needs a runtime, for its 'runs'"),
        ("verifiers-taskset", {"kind": "WithFiles"}, "needs a runtime, for its 'setup'"),
        ("verifiers-taskset", {"kind": "InContainer"}, "needs a container"),
        ("verifiers-taskset", {"prompt": False}, "a text or messages"),
    ],
)
def test_what_cannot_be_scored_directly_is_refused(name, options, message, caplog):
    caplog.set_level(logging.CRITICAL)
    with pytest.raises(ConfigError, match=message):
        make_env(f"verifiers:{name}", **options)
