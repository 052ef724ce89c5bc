"""Tools of a real MCP server, over stdio."""

import asyncio
import logging
import sys
import threading
from pathlib import Path

import pytest

from envs_adapters import Action, BrokenCall, ToolCall, make_env
from envs_adapters.mcp_server import ServerGone
from rollout_engine.base.errors import ConfigError
from rollout_engine.rollouts.episodes.env_calls import EnvCalls

pytest.importorskip("mcp")


SERVER = f"mcp:{sys.executable} '{Path(__file__).with_name('mcp_tools.py')}'"
ROWS = [{"prompt": f"What is {number} + 2?", "answer": str(number + 2)} for number in range(3)]


def score(text, row):
    return float(row["answer"] in text)


async def score_later(text, row):
    await asyncio.sleep(0)
    return score(text, row) / 2


def calls(*made, broken=()):
    made = [ToolCall(name, arguments) for name, arguments in made]
    return Action("calls", tool_calls=made, broken_calls=[BrokenCall("{", each) for each in broken])


def play(*actions, seed=1, reward=score, **options):
    """The environment, its prompt, and what came of each action."""
    env = make_env(SERVER, rows=ROWS, reward=reward, **options)()

    async def episode():
        try:
            return [await env.reset(seed), *[await env.step(action) for action in actions]]
        finally:
            await env.close()

    return env, *asyncio.run(episode())


def contents(observation):
    return [message["content"] for message in observation.messages]


def test_calls_are_answered_by_the_server_and_the_last_answer_has_the_reward():
    two = calls(("add", {"a": 1, "b": 2}), ("add", {"a": 5, "b": 6}))
    env, prompt, answered, last = play(two, Action("It is 3."))
    assert prompt == "What is 1 + 2?"
    assert answered.messages == [
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "tool", "name": "add", "content": "11"},
    ]
    assert (answered.reward, answered.terminated) == (0.0, False)
    assert (last.reward, last.terminated, last.messages) == (1.0, True, ())
    assert last.info == {"num_tool_calls": 2}


def test_the_tools_are_those_of_the_server_in_the_form_of_chat_templates():
    env, _ = play()
    functions = {tool["function"]["name"]: tool["function"] for tool in env.tools}
    assert list(functions) == ["add", "keep", "fail", "sleep", "flood", "leave", "variable"]
    assert functions["add"]["description"] == "Add two numbers."
    assert functions["add"]["parameters"]["properties"]["a"]["type"] == "integer"
    assert functions["add"]["parameters"]["required"] == ["a", "b"]
    env, _ = play(tools=["keep", "add"])
    assert [tool["function"]["name"] for tool in env.tools] == ["keep", "add"]


def test_what_goes_wrong_with_a_call_is_read_by_the_policy():
    wrong = calls(
        ("ad", {"a": 1, "b": 2}),
        ("add", {"a": "one", "b": 2}),
        ("fail", {"reason": "no luck"}),
        ("flood", {}),
        ("leave", {}),
        broken=["no JSON"],
    )
    chosen = ["add", "fail", "flood"]
    _, _, answered, last = play(wrong, Action("3"), tools=chosen)
    unknown, arguments, failed, flood, hidden, broken = contents(answered)
    assert unknown == "Error: Unknown tool 'ad'. Did you mean 'add'?"
    assert arguments.startswith("Error") and "integer" in arguments
    assert failed.startswith("Error") and "no luck" in failed
    assert flood == "Error: flood returned 524288 characters, more than 262144."
    assert hidden.startswith("Error: Unknown tool 'leave'. Known: add")
    assert broken == "Error: no JSON"
    assert last.reward == 1.0


def test_a_call_that_takes_too_long_is_given_up():
    _, _, answered = play(calls(("sleep", {"seconds": 2.5})), call_timeout=0.2)
    assert contents(answered) == ["Error: sleep did not return within 0.2 s."]


def test_the_reward_may_be_awaited_and_be_named_as_text():
    *_, last = play(Action("5"), seed=6, reward=score_later)
    assert last.reward == 0.0
    *_, last = play(Action("2"), seed=6, reward="tests.envs.test_mcp:score")
    assert last.reward == 1.0


def test_the_server_has_the_environment_variables_it_is_given():
    _, _, answered = play(calls(("variable", {"name": "TEAM"})), env={"TEAM": "red"})
    assert contents(answered) == ["red"]


@pytest.mark.parametrize("shared, totals", [(False, ["total 2", "total 2"]), (True, ["total 2", "total 4"])])
def test_episodes_have_servers_of_their_own_unless_they_share_one(shared, totals):
    spec = make_env(SERVER, rows=ROWS, reward=score, shared=shared)
    first, second = spec(), spec()

    async def both():
        await asyncio.gather(first.reset(0), second.reset(1))
        kept = [contents(await env.step(calls(("keep", {"number": 2}))))[0] for env in (first, second)]
        await first.close()
        assert contents(await second.step(calls(("add", {"a": 1, "b": 1})))) == ["2"]
        await second.close()
        again = spec()
        await again.reset(0)
        assert contents(await again.step(calls(("keep", {"number": 2})))) == ["total 2"]
        await again.close()
        return kept

    assert asyncio.run(both()) == totals


@pytest.mark.parametrize("shared", [False, True])
def test_a_server_that_ends_by_itself_ends_the_episode_and_no_later_one(shared):
    with pytest.raises(ServerGone, match="has ended by itself during a call of leave"):
        play(calls(("leave", {})), shared=shared)
    *_, last = play(Action("3"), shared=shared)
    assert last.reward == 1.0


def test_a_server_that_does_not_start_says_so():
    env = make_env(f"{SERVER} --broken", rows=ROWS, reward=score)()

    async def begin():
        try:
            await env.reset(0)
        finally:
            await env.close()

    with pytest.raises(ServerGone, match="--broken did not start"):
        asyncio.run(begin())


def test_episodes_run_beside_the_engine_on_its_event_loop(caplog):
    came = threading.Event()
    spec = make_env(SERVER, rows=ROWS, reward=score, shared=True)
    running = EnvCalls(spec, came.set)
    rewards, turns = {}, {}
    try:
        for key in range(8):
            running.reset(key, key)
        while len(rewards) < 8:
            assert came.wait(60)
            came.clear()
            for key, result in running.take():
                turns[key] = turns.get(key, 0) + 1
                if turns[key] == 1:
                    assert result.observation.messages == ROWS[key % 3]["prompt"]
                    assert result.tools[0]["function"]["name"] == "add"
                    running.step(key, calls(("add", {"a": key % 3, "b": 2})))
                elif turns[key] == 2:
                    running.step(key, Action(f"It is {contents(result)[0]}."))
                else:
                    rewards[key] = result.reward
                    running.close(key)
    finally:
        running.end()
    assert rewards == {key: {0: 1.0} for key in range(8)}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "command, options, message",
    [
        (SERVER, {"reward": score}, "needs the option rows"),
        (SERVER, {"rows": ROWS}, "needs the option reward"),
        (SERVER, {"rows": [{"question": "?"}], "reward": score}, "the field 'prompt' is missing"),
        (SERVER, {"rows": ROWS, "reward": "nowhere:score"}, "No module named 'nowhere'"),
        (SERVER, {"rows": ROWS, "reward": score, "call_timeout": 0}, "positive number of seconds"),
        (SERVER, {"rows": ROWS, "reward": score, "tools": "add"}, "a list of names"),
        (SERVER, {"rows": ROWS, "reward": score, "share": True}, "Did you mean 'shared'"),
        ("mcp:no-such-program", {"rows": ROWS, "reward": score}, "a program that exists"),
        ("mcp:python 'my", {"rows": ROWS, "reward": score}, "quoted as for a shell"),
    ],
)
def test_what_does_not_fit_is_refused_before_an_episode_begins(command, options, message):
    with pytest.raises(ConfigError, match=message):
        make_env(command, **options)


def test_a_tool_that_the_server_lacks_is_refused_when_the_episode_begins():
    with pytest.raises(ConfigError, match="Unknown tool of the server 'ad'. Did you mean 'add'"):
        play(tools=["ad"])
