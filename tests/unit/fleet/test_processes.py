"""How many replicas this machine takes: the same number at the start of a fleet and when it is scaled."""

import os

import pytest

from rollout_engine import ConfigError, EngineConfig
from rollout_engine.fleet.run.processes import ProcessProvider

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
