"""Environments on threads and on the event loop: results, deadlines, order, ends."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from envs_adapters.base import Action, Observation
from rollout_engine.base import threads
from rollout_engine.base.errors import RetryableError, StepDeadlineError
from rollout_engine.rollouts.episodes.env_calls import Began, EnvFailure

ROOT = Path(__file__).parents[4]


class Counter:
    """Counts its steps; text "5" ends it."""

    def reset(self, seed):
        self.count = seed
        return f"seed {seed}"

    def step(self, action):
        self.count += 1
        return Observation(f"{self.count}", 1.0, terminated=action.text == "5")


def test_episodes_are_reset_and_stepped(run_env):
    env = run_env(Counter)
    began = env.reset(7, seed=3)
    assert began == Began(Observation("seed 3", {}), [], 1)
    assert env.step(Action("a"), 7) == Observation("4", {0: 1.0})
    assert env.step(Action("5"), 7).terminated
    failure = env.step(Action("a"), 7)
    assert (
        isinstance(failure, EnvFailure) and failure.reason == "Counter: step: the episode had ended before this step."
    )


def test_a_key_is_free_again_once_closed_and_a_result_still_to_come_is_dropped(run_env):
    env = run_env(Slow)
    env.calls.reset(0, 1)
    env.calls.close(0)
    env.calls.close(0)
    env.calls.reset(0, 2)
    assert env.results(1)[0][1].observation.messages == "2"
    env.calls.close(0)


class Slow:
    def reset(self, seed):
        time.sleep(0.05)
        return str(seed)

    def step(self, action):
        return Observation()


class Raises:
    def __init__(self, problem=None):
        self.problem = problem

    def reset(self, seed):
        return "a"

    def step(self, action):
        raise self.problem


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class AwaitsAndRaises(Raises):
    async def step(self, action):
        await asyncio.sleep(0)
        raise self.problem


@pytest.mark.parametrize("factory", [Raises, AwaitsAndRaises])
def test_an_exception_without_a_text_is_a_failure_like_any_other(run_env, factory):
    env = run_env(factory, arguments={"problem": Unspeakable()}, num_workers=1)
    env.reset(0)
    env.reset(1)
    for key in (0, 1):
        said = env.step(Action(""), key).reason
        assert said == f"{factory.__name__}: step raised Unspeakable: <Unspeakable: no words>"


class ClosesBadly(Counter):
    @property
    def close(self):
        raise Unspeakable


def test_a_close_that_cannot_be_looked_up_is_reported(run_env, caplog):
    env = run_env(ClosesBadly)
    env.reset()
    env.calls.close(0)
    env.calls.end()
    assert "ClosesBadly: close raised Unspeakable" in caplog.text


@pytest.mark.parametrize("problem", [ValueError("two\nlines"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_what_an_environment_raises_is_its_failure(run_env, problem):
    env = run_env(Raises, arguments={"problem": problem})
    env.reset()
    failure = env.step(Action(""))
    assert failure.exception is problem
    assert failure.reason == " ".join(f"Raises: step raised {type(problem).__name__}: {problem}".split())
    assert isinstance(env.step(Action("")), EnvFailure)


class Forks(Counter):
    """Forks in `step`, out of which both processes come."""

    def step(self, action):
        if (child := os.fork()) == 0:
            return Observation("from the child")
        return Observation(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))


class ForksAndAwaits(Forks):
    async def step(self, action):
        return super().step(action)


@pytest.mark.quick(1)
@pytest.mark.parametrize("factory", [Forks, ForksAndAwaits])
def test_a_forked_child_that_leaves_step_ends_and_takes_no_other_call(run_env, factory):
    env = run_env(factory)
    for key in range(3):
        env.reset(key)
    for key in range(3):
        env.calls.step(key, Action(""))
    assert [observation.messages for _, observation in env.results(3)] == ["1"] * 3


@pytest.mark.parametrize("factory, reason", [(dict, "no method 'reset'"), (lambda: 1 / 0, "ZeroDivisionError")])
def test_what_is_no_environment_fails_at_its_reset(run_env, factory, reason):
    assert reason in run_env(factory).reset().reason


STARTED, RELEASED = threading.Event(), threading.Event()


class Hangs:
    """Waits in the system, where nothing interrupts it, or in Python."""

    closed = []

    def __init__(self, how="system"):
        self.how = how

    def reset(self, seed):
        return "a"

    def step(self, action):
        STARTED.set()
        if self.how == "system":
            RELEASED.wait()
        while self.how == "python":
            pass
        return Observation("late")

    def close(self):
        self.closed.append(self.how)


def test_a_loop_in_python_is_interrupted(run_env):
    env = run_env(Hangs, arguments={"how": "python"}, step_timeout=0.2)
    env.reset()
    failure = env.step(Action(""))
    assert failure.reason == "Hangs: step did not return within 0.2 seconds (step_timeout)."
    assert isinstance(failure.exception, StepDeadlineError)


def test_stuck_threads_are_replaced_and_their_environments_closed_once_they_return(run_env):
    Hangs.closed.clear()
    RELEASED.clear()
    env = run_env(Hangs, num_workers=2, step_timeout=0.2)
    for key in range(4):
        env.calls.reset(key, 0)
    env.results(4)
    for key in range(4):
        env.calls.step(key, Action(""))
    assert all(isinstance(result, EnvFailure) for _, result in env.results(4))
    assert "has still not returned" in env.step(Action(""), 0).reason
    assert isinstance(env.reset(9), Began)
    for key in range(4):
        env.calls.close(key)
    assert not Hangs.closed
    RELEASED.set()
    deadline = time.monotonic() + 60
    while len(Hangs.closed) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(Hangs.closed) == 4


def test_a_hung_thread_does_not_keep_the_interpreter():
    program = """
import threading
from envs_adapters import Action, EnvSpec
from rollout_engine.rollouts.episodes.env_calls import EnvCalls

class Hangs:
    def reset(self, seed):
        threading.Event().wait()

    step = None.__init__

done = threading.Event()
calls = EnvCalls(EnvSpec(Hangs, step_timeout=0.1), done.set)
calls.reset(0, 0)
done.wait()
print(calls.take()[0][1].reason)
calls.end()
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.stdout == "Hangs: reset did not return within 0.1 seconds (step_timeout).\n"
    assert run.returncode == 0
    assert "1 environments did not return" in run.stderr


class Waits:
    """Awaits; its methods never run at the same time."""

    def __init__(self, seconds=0.05):
        self.seconds, self.is_inside = seconds, False

    async def reset(self, seed):
        return await self.wait("a")

    async def step(self, action):
        return Observation(await self.wait("b"), 1.0)

    async def close(self):
        await asyncio.sleep(0)

    async def wait(self, text):
        assert not self.is_inside
        self.is_inside = True
        await asyncio.sleep(self.seconds)
        self.is_inside = False
        return text


def test_a_thousand_environments_that_await_do_so_at_once(run_env):
    env = run_env(Waits, arguments={"seconds": 0.5})
    start = time.monotonic()
    for key in range(1000):
        env.calls.reset(key, 0)
    env.results(1000)
    for key in range(1000):
        env.calls.step(key, Action(""))
    assert all(result == Observation("b", {0: 1.0}) for _, result in env.results(1000))
    assert time.monotonic() - start < 100  # one after the other they would take 1,000 seconds


def test_calls_of_one_episode_run_one_after_the_other(run_env):
    env = run_env(Waits, arguments={"seconds": 0.01})
    env.calls.reset(0, 0)
    for _ in range(5):
        env.calls.step(0, Action(""))
    results = [result for _, result in env.results(6)]
    assert isinstance(results[0], Began) and results[1:] == [Observation("b", {0: 1.0})] * 5


def test_a_deadline_cancels_what_awaits(run_env):
    env = run_env(Waits, arguments={"seconds": 1000.0}, step_timeout=0.2)
    assert "did not return within 0.2 seconds" in env.reset().reason


class Blocks(Waits):
    """Blocks the event loop."""

    async def step(self, action):
        if action.text == "python":
            while True:
                pass
        if action.text == "system":
            RELEASED.wait()
        return Observation()


@pytest.mark.quick(1)
@pytest.mark.parametrize("how", ["python", "system"])
def test_an_environment_that_blocks_the_event_loop_stops_no_later_one(run_env, how):
    RELEASED.clear()
    env = run_env(Blocks, step_timeout=1.0)
    env.reset(0)
    env.reset(1)
    try:
        assert "did not return within 1 seconds" in env.step(Action(how), 0).reason
        assert env.step(Action(""), 1) == Observation([], {0: 0.0})
    finally:
        RELEASED.set()


class Mixed(Counter):
    """Its reset awaits, its step does not."""

    async def reset(self, seed):
        await asyncio.sleep(0)
        return Counter.reset(self, seed)


def test_one_method_may_be_async_and_the_other_not(run_env):
    env = run_env(Mixed)
    env.reset(seed=1)
    assert env.step(Action("")).messages == "2"


async def five():
    await asyncio.sleep(0)
    return 5


@pytest.mark.parametrize("function, result", [(lambda: 3, 3), (five, 5)])
def test_functions_of_our_own_run_beside_the_environment(run_env, function, result):
    env = run_env(Counter)
    env.calls.run(0, function)
    assert env.results(1) == [(0, result)]


def test_a_function_of_our_own_does_not_block_environments_that_await(run_env):
    env = run_env(Waits)
    env.reset(0)
    env.reset(1)
    RELEASED.clear()
    env.calls.run(0, RELEASED.wait)
    assert env.step(Action(""), 1).messages == "b"
    RELEASED.set()
    assert env.results(1) == [(0, True)]


def test_a_function_of_our_own_has_the_deadline_and_its_failure_too(run_env):
    env = run_env(Counter, step_timeout=0.2)
    env.calls.run(0, lambda: 1 / 0)
    assert "ZeroDivisionError" in env.results(1)[0][1].reason
    env.calls.run(1, lambda: time.sleep(0.5))
    assert "did not return within 0.2 seconds" in env.results(1)[0][1].reason


def test_without_a_thread_a_call_fails_and_may_be_made_again(run_env, monkeypatch):
    env = run_env(Counter)
    start = threading.Thread.start

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads.threading.Thread, "start", refuse)
    failure = env.reset(0)
    assert isinstance(failure.exception, RetryableError)
    monkeypatch.setattr(threads.threading.Thread, "start", start)
    env.calls.close(0)
    assert isinstance(env.reset(0), Began)


class Closes(Counter):
    num_closed = 0

    def close(self):
        type(self).num_closed += 1
        raise ValueError("not closed")


def test_end_closes_every_environment_and_may_be_called_again(run_env, caplog):
    env = run_env(Closes)
    for key in range(5):
        env.reset(key)
    env.calls.end()
    env.calls.end()
    assert Closes.num_closed == 5
    assert "Closes: close raised ValueError: not closed" in caplog.text
    with pytest.raises(RuntimeError, match="ended"):
        env.calls.reset(9, 0)
