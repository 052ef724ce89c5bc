"""How many replicas this machine takes: the same number at the start of a fleet and when it is scaled."""

import os
import threading

import pytest

from rollout_engine import ConfigError, EngineConfig, EngineDeadError, LifecycleError
from rollout_engine.fleet.run.processes import ProcessProvider
from rollout_engine.process import process_client

CONFIG = EngineConfig(model="m")


@pytest.fixture(autouse=True)
def two_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


@pytest.mark.parametrize("num_present", range(8))
def test_replicas_beyond_the_processors_are_warned_of_and_far_more_are_refused(num_present, caplog):
    provider = ProcessProvider()
    for total in range(num_present + 1, 9):
        caplog.clear()
        provider.check(total - num_present, CONFIG, num_present)
        assert (f"num_replicas={total} is more than the 2 processors" in caplog.text) == (total > 2)
    with pytest.raises(ConfigError, match="num_replicas=9 is more than the 2 processors of this machine carry"):
        provider.check(9 - num_present, CONFIG, num_present)


def test_replicas_share_the_processors_of_which_each_has_one_at_least():
    assert [ProcessProvider().share(CONFIG, count).num_threads for count in (1, 2, 3)] == [2, 1, 1]


class LoadingCore:
    """The process of a core that loads its model until it is killed."""

    made: "list[LoadingCore]" = []

    def __init__(self, config, **options):
        self.loads, self.killed = threading.Event(), threading.Event()
        self.made.append(self)

    def wait_ready(self, seconds):
        self.loads.set()
        assert self.killed.wait(60)
        raise EngineDeadError("The core ended at start-up.")

    def kill(self):
        self.killed.set()

    def end(self, *, kill=False):
        self.killed.set()


def test_cores_that_load_are_killed_when_the_fleet_is_closed(monkeypatch):
    monkeypatch.setattr(process_client, "CoreProcess", LoadingCore)
    monkeypatch.setattr(LoadingCore, "made", [])
    provider, problems = ProcessProvider(), []

    def start(index):
        with pytest.raises((EngineDeadError, LifecycleError)) as raised:
            provider.start(index, CONFIG)
        problems.append(type(raised.value))

    threads = [threading.Thread(target=start, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    while len(LoadingCore.made) < 2:
        threading.Event().wait(0.001)
    assert all(core.loads.wait(60) for core in LoadingCore.made)
    provider.close()
    for thread in threads:
        thread.join()
    start(2)  # as one does that began before, and came to its process later
    assert problems == [EngineDeadError, EngineDeadError, LifecycleError]
    assert all(core.killed.is_set() for core in LoadingCore.made) and not provider._loading
