"""Environments beside the engine, and a policy whose model is fake; nothing may be left after a test."""

import threading
import time

import pytest

from envs_adapters.base import EnvSpec
from rollout_engine.rollouts.episodes.env_calls import EnvCalls
from rollout_engine.rollouts.policy import RolloutPolicy
from tests.unit.fake_engine import CODEC, make_engine
from tests.unit.rollouts.episodes.playing import Counting

WAIT_SECONDS = 60.0


class Runner:
    """`EnvCalls`, and a wait for their results."""

    def __init__(self, spec, kept=None):
        self._has_done = threading.Event()
        self.calls = EnvCalls(spec, self._has_done.set, kept)

    def results(self, number):
        """The next `number` results, as (key, result)."""
        found = []
        while len(found) < number:
            found += self.results_so_far()
        assert len(found) == number
        return found

    def results_so_far(self):
        """What has completed, once something has."""
        assert self._has_done.wait(WAIT_SECONDS)
        self._has_done.clear()
        return self.calls.take()

    def reset(self, key=0, seed=0):
        self.calls.reset(key, seed)
        return self.results(1)[0][1]

    def step(self, action, key=0):
        self.calls.step(key, action)
        return self.results(1)[0][1]


def _threads():
    """All but the one that starts processes, which lasts as long as this process."""
    return {thread for thread in threading.enumerate() if thread.name != "process-starter"}


@pytest.fixture
def run_env():
    """Run environments of a class, with options of `EnvSpec`; ended after the test, with no thread left.

    `kept`: their `KeptWorkers`.
    """
    before, made = _threads(), []

    def run(factory, kept=None, **options):
        options.setdefault("name", getattr(factory, "__name__", "Env"))
        made.append(Runner(EnvSpec(factory, **options), kept))
        return made[-1]

    def end():
        for runner in made:
            runner.calls.end()

    run.end = end
    yield run
    end()
    deadline = time.monotonic() + WAIT_SECONDS
    while (left := _threads() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


@pytest.fixture
def policy():
    """A policy over the real front end and core."""
    engine = make_engine(CODEC, max_model_len=256)
    Counting.actions = []
    yield RolloutPolicy(engine)
    assert not engine.core.has_unfinished_requests()
    assert engine.core.cache_usage() == 0
    assert len(engine.frontend.streams) == 0
    engine.core.check_integrity()
