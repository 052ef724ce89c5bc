"""Runs of agents over a fake gateway; nothing may be left after a test."""

import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.rollouts.agents.agent import Agent
from rollout_engine.rollouts.agents.plan import AgentPlan
from rollout_engine.rollouts.agents.run import AgentRun
from tests.unit.rollouts.agents.fake_gateway import FakeGateway

WAIT_SECONDS = 60.0


def _threads():
    return {thread for thread in threading.enumerate() if thread.name != "process-starter"}


@pytest.fixture
def gateway():
    return FakeGateway()


@pytest.fixture
def play(gateway, tmp_path, monkeypatch):
    """Play an agent on tasks; returns its episodes in their order. Threads, sessions and directories must be gone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = _threads()

    def run(program, tasks=(None,), num_samples=1, *, episode_timeout=float("inf"), max_in_flight=8, **options):
        agent = program if isinstance(program, Agent) else Agent(program, **options)
        plan = AgentPlan(agent, SamplingParams(), 7, list(tasks), num_samples, episode_timeout, max_in_flight)
        groups = []
        with closing(AgentRun(plan, lambda **options: gateway, may_all_fail=True)) as made:
            while made.unfinished:
                groups += made.advance()
        return [each for group in sorted(groups, key=lambda group: group.index) for each in group.episodes]

    yield run
    assert all(session.is_closed for session in gateway.sessions)
    assert not list(Path(tmp_path).glob("rollout-agents-*"))
    deadline = time.monotonic() + WAIT_SECONDS
    while (left := _threads() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


@pytest.fixture
def play_one(play):
    """Play one episode; returns it."""

    def run(*args, **options):
        [episode] = play(*args, **options)
        return episode

    return run
