"""Faults of environments at random: every call has one result, and nothing is left."""

import gc
import os
import random
import re
import threading
import time

import psutil
import pytest

from envs_adapters.base import Action
from rollout_engine.rollouts.episodes.env_calls import Began, EnvFailure
from rollout_engine.rollouts.episodes.kept_workers import KeptWorkers
from tests.unit.rollouts.episodes import process_envs

STEP_TIMEOUT = 0.5
NUM_OPEN = 24
"""Episodes at a time."""
WAIT_SECONDS = 60

OVERDUE = re.compile("did not return|took more than")
HARMLESS = ["go"] * 4
FAULTS = {
    "raise no": "ValueError: no",
    "sysexit 3": "SystemExit",
    "nan": "finite number",
    "none": "not NoneType",
    "wrong": "not int",
    "text 10000000": "10000000 bytes",
    "loop": "did not return",
    "late": "did not return",
}
DEATHS = {
    "exit 3": "exited with status 3",
    "signal SIGKILL": "killed by SIGKILL",
    "signal SIGSEGV": "killed by SIGSEGV",
}


class Faults:
    """Episodes of up to five steps, one of which may be a fault."""

    def __init__(self, env, faults, seed):
        self.env, self.faults, self.random = env, list(faults), random.Random(seed)
        self.open, self.num_faults, self.num_results, self.num_calls = {}, 0, 0, 0
        self.next_key, self.num_overdue, self.counts = 0, 0, {}

    def play(self, number):
        """Make `number` faults, and finish all episodes."""
        while self.num_faults < number or self.open:
            while self.num_faults < number and len(self.open) < NUM_OPEN:
                self._begin()
            for key, result in self.env.results_so_far():
                self._go_on(key, result)
        assert self.num_results == self.num_calls > 2 * self.num_overdue

    def _begin(self):
        texts = HARMLESS[: self.random.randrange(5)]
        if self.random.random() < 0.8:
            texts.append(self.random.choice(self.faults))
            self.num_faults += 1
        key, self.next_key = self.next_key, self.next_key + 1
        self.open[key] = (texts, None)
        self.env.calls.reset(key, key % 7)
        self.num_calls += 1

    def _go_on(self, key, result):
        texts, text = self.open[key]  # KeyError: a second result of a call, or one after the end
        self.num_results += 1
        if isinstance(result, EnvFailure) and OVERDUE.search(result.reason):
            self.num_overdue += 1  # on a busy machine anything may be
        elif text is None:
            assert isinstance(result, Began), result
        elif text in HARMLESS:
            self.counts[key] = count = self.counts.get(key, 0) + 1
            assert result.messages == f"{key % 7}: {count}", result
        else:
            assert isinstance(result, EnvFailure) and (FAULTS | DEATHS)[text] in result.reason, (text, result)
        if not texts or isinstance(result, EnvFailure):
            self.env.calls.close(key)
            del self.open[key]
            return
        text, *rest = texts
        self.open[key] = (rest, text)
        self.env.calls.step(key, Action(text))
        self.num_calls += 1


def _play(run_env, number, placement, faults, num_workers):
    gc.collect()
    descriptors, children = _descriptors(), set(psutil.Process().children(recursive=True))
    process_envs.Obeys.num_open = 0
    options = {"placement": placement, "num_workers": num_workers, "step_timeout": STEP_TIMEOUT}
    kept = KeptWorkers()
    for seed in range(2):  # the second half begins in workers that the first one leaves
        env = run_env(process_envs.Obeys, kept, **options)
        half = Faults(env, faults, seed)
        half.play(number // 2)
        assert half.num_faults >= number // 2
        assert not env.calls.take()
        env.calls.end()
    kept.close()
    deadline = time.monotonic() + WAIT_SECONDS
    while (len(_descriptors()) > len(descriptors) or process_envs.Obeys.num_open) and time.monotonic() < deadline:
        time.sleep(0.05)  # what hung returns
    assert not process_envs.Obeys.num_open
    assert len(_descriptors()) <= len(descriptors)
    assert not set(psutil.Process().children(recursive=True)) - children
    assert not [each for each in threading.enumerate() if each.name == "environment deadlines"]


def _descriptors():
    return os.listdir("/proc/self/fd")


@pytest.mark.parametrize("number", [8, pytest.param(1000, marks=pytest.mark.slow)])
def test_faults_on_threads_end_their_episodes_alone(run_env, number):
    _play(run_env, number, "threads", FAULTS, 16)


@pytest.mark.slow
@pytest.mark.parametrize("number", [4, pytest.param(1000, marks=pytest.mark.slow)])
def test_faults_in_processes_end_their_episodes_alone(run_env, number):
    _play(run_env, number, "processes", FAULTS | DEATHS, 2)
