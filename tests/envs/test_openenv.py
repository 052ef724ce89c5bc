"""Environments of OpenEnv: a real server's, and the same classes in this process."""

import asyncio
import json
import random
import socket
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, contextmanager
from urllib.request import urlopen

import pytest

from envs_adapters import Action, make_env
from envs_adapters.openenv import OpenEnvError
from rollout_engine.base.errors import ConfigError
from rollout_engine.rollouts.episodes.env_calls import EnvCalls, EnvFailure

pytest.importorskip("openenv")

import websockets  # noqa: E402

WORLDS = "openenv:tests.envs.openenv_worlds"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A server in a process of its own, with room for three sessions."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-m", "uvicorn", "--fd", str(listener.fileno()), "tests.envs.openenv_worlds:app"]
        log = (tmp_path_factory.mktemp("server") / "log").open("w")
        server = subprocess.Popen(command, pass_fds=[listener.fileno()], stdout=log, stderr=log)
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        try:
            urlopen(f"http://{place}/health", timeout=120).close()  # importing all that it needs takes it a while
            yield f"ws://{place}"
        finally:
            server.terminate()
            server.wait(30)
            log.close()


def number_of(seed):
    return str(random.Random(seed).randint(1, 9))


async def play(env, *guesses, seed=5):
    """Reset, step by step, and close; whether the methods are async or not."""

    async def value_of(value):
        return await value if asyncio.iscoroutine(value) else value

    observations = [await value_of(env.reset(seed))]
    try:
        observations += [await value_of(env.step(Action(guess))) for guess in guesses]
    finally:
        await value_of(env.close())
    return observations


def wrong(seed):
    return "1" if number_of(seed) != "1" else "2"


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("where", ["server", "GuessNumber", "AwaitedNumber"])
def test_an_episode_is_that_of_its_seed(address, where, seed):
    target = f"openenv:{address}" if where == "server" else f"{WORLDS}:{where}"
    first, second, last = asyncio.run(play(make_env(target)(), wrong(seed), number_of(seed), seed=seed))
    assert first.messages == "Guess."
    assert (second.messages, second.reward, second.terminated) == ("1: False", 0.0, False)
    assert (last.messages, last.reward, last.terminated, last.truncated) == ("2: True", 1.0, True, False)
    assert last.info == {"observation": {"text": "2: True"}, "metadata": {"count": 2}}


@pytest.mark.parametrize("where", ["server", "GuessNumber"])
def test_options_reach_the_reset_and_texts_are_made_as_they_say(address, where):
    target = f"openenv:{address}/" if where == "server" else f"{WORLDS}:{where}"
    options = {
        "action_from_text": lambda text: {"guess": text.removeprefix("It is ")},
        "observation_to_text": lambda observation: [{"role": "user", "content": observation["text"].upper()}],
        "reset_options": {"first": "Well?"},
    }
    first, last = asyncio.run(play(make_env(target, **options)(), f"It is {number_of(5)}"))
    assert first.messages == [{"role": "user", "content": "WELL?"}]
    assert last.terminated


def test_actions_of_several_fields_are_json():
    spec = make_env(f"{WORLDS}:Grid", action_from_text="json:loads")
    first, second = asyncio.run(play(spec(), '{"row": 1, "column": 2}'))
    assert json.loads(first.messages) == {"text": "Move.", "cells": []}
    assert json.loads(second.messages) == {"text": "Moved.", "cells": [1, 2]}
    assert second.reward == 3.0
    spec = make_env(f"{WORLDS}:Grid", action_from_text="json:loads", observation_to_text={"field": "text"})
    assert asyncio.run(play(spec()))[0].messages == "Move."


def test_an_error_of_the_environment_is_told_and_the_server_goes_on(address):
    env = make_env(f"openenv:{address}")()
    with pytest.raises(OpenEnvError, match="EXECUTION_ERROR: invalid literal for int"):
        asyncio.run(play(env, "seven"))
    env = make_env(f"openenv:{address}", action_from_text={"field": "gess"})()
    with pytest.raises(OpenEnvError, match="VALIDATION_ERROR: Invalid message.*guess"):
        asyncio.run(play(env, "7"))
    assert asyncio.run(play(make_env(f"openenv:{address}")()))[0].messages == "Guess."


def test_more_episodes_than_sessions_wait_for_their_turn(address):
    spec = make_env(f"openenv:{address}")

    async def all_of_them():
        return await asyncio.gather(*(play(spec(), wrong(seed), number_of(seed), seed=seed) for seed in range(12)))

    assert [episode[-1].reward for episode in asyncio.run(all_of_them())] == [1.0] * 12


def test_a_call_that_hangs_is_cut_and_its_session_given_up(address):
    with episodes(make_env(f"openenv:{address}", step_timeout=1)) as calls:
        calls.reset(1, 5)
        assert results(calls, 1)[1].observation.messages == "Guess."
        calls.step(1, Action("hang"))
        failure = results(calls, 1)[1]
        assert isinstance(failure, EnvFailure) and "step" in failure.reason


def test_episodes_run_beside_the_engine_on_its_event_loop(address):
    with episodes(make_env(f"openenv:{address}")) as calls:
        for seed in range(6):
            calls.reset(seed, seed)
        ended = {}
        while len(ended) < 6:
            for key, result in results(calls, 1).items():
                if getattr(result, "terminated", False):
                    ended[key] = result
                    calls.close(key)
                else:
                    calls.step(key, Action(number_of(key)))
        assert {key: result.reward for key, result in ended.items()} == {key: {0: 1.0} for key in range(6)}


def test_a_server_that_is_gone_and_one_that_talks_nonsense_are_told():
    with pytest.raises(OpenEnvError, match="cannot be reached"):
        asyncio.run(play(make_env("openenv:ws://127.0.0.1:9", action_from_text={"field": "guess"})()))

    async def meet(*answers):
        async with fake_server(answers) as url:
            return await play(make_env(f"openenv:{url}", action_from_text={"field": "guess"})())

    with pytest.raises(OpenEnvError, match="closed the connection at the reset"):
        asyncio.run(meet())
    with pytest.raises(OpenEnvError, match="no JSON"):
        asyncio.run(meet("{"))
    with pytest.raises(OpenEnvError, match="a message of the type 'state'"):
        asyncio.run(meet('{"type": "state", "data": {}}'))
    with pytest.raises(OpenEnvError, match="a message of the type 'list'"):
        asyncio.run(meet("[]"))


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("ws://127.0.0.1:9", {}, "Start the server first"),
        ("ws://127.0.0.1:9", {"arguments": {}}, "arguments is for environments in process"),
        ("tests.envs.openenv_worlds:Grid", {}, r"row \(integer\), column \(integer\). Give action_from_text"),
        ("tests.envs.openenv_worlds:Unseeded", {}, "its reset takes no `seed`"),
        ("tests.envs.openenv_worlds:Guest", {}, "has no attribute 'Guest'"),
        ("tests.envs.openenv_worlds:GuessNumber", {"arguments": {"size": 3}}, "cannot be made: TypeError"),
        ("tests.envs.openenv_worlds:GuessNumber", {"action_from_text": {"fields": "a"}}, '{"field": NAME}'),
        ("tests.envs.openenv_worlds:GuessNumber", {"observation_to_text": "nowhere:to"}, "No module named 'nowhere'"),
        (
            "tests.envs.openenv_worlds:GuessNumber",
            {"action_form_text": "json:loads"},
            "Did you mean 'action_from_text'",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_an_episode_begins(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_env(f"openenv:{name}", **options)


@asynccontextmanager
async def fake_server(answers):
    async def serve(connection):
        await connection.recv()
        for answer in answers:
            await connection.send(answer)
        await connection.close()

    async with websockets.serve(serve, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@contextmanager
def episodes(spec):
    came = threading.Event()
    calls = EnvCalls(spec, came.set)
    calls.came = came
    try:
        yield calls
    finally:
        calls.end()


def results(calls, count):
    """At least `count` results, by key."""
    found = {}
    while len(found) < count:
        assert calls.came.wait(30)
        calls.came.clear()
        found.update(calls.take())
    return found
