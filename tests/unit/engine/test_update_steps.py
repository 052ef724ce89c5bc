"""An update that finds the engine busy with something else ends at its deadline, and leaves nothing behind."""

import math
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from rollout_engine.base.errors import LifecycleError, TransferTimeoutError
from rollout_engine.base.messages import UpdateOptions
from rollout_engine.engine.update_steps import UpdateSteps


@contextmanager
def busy(driver):
    """Another thread holds the engine until the end of the block."""
    begun, go_on = threading.Event(), threading.Event()

    def hold():
        with driver.between_steps():
            begun.set()
            go_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        go_on.set()
        thread.join(60)


@pytest.fixture
def engine(make_engine):
    return make_engine()


@pytest.fixture
def driver(engine):
    return engine.frontend.client.driver


@pytest.fixture
def steps(driver, monkeypatch):
    monkeypatch.setattr(driver.executor, "updater", SimpleNamespace(dirty=False), raising=False)
    return UpdateSteps(driver, UpdateOptions(), lambda: None)


def soon():
    return time.monotonic() + 0.05


def test_an_update_does_not_begin_after_its_deadline(engine, driver, steps):
    with busy(driver), pytest.raises(TransferTimeoutError, match="could not begin in the time given: the engine is"):
        steps.begin(soon())
    assert engine.get_metrics().core.state == "RUNNING"


def test_an_update_is_not_committed_after_its_deadline(engine, driver, steps):
    entered = []

    def commit():
        with steps.boundary(soon()):
            entered.append("the boundary")

    steps.begin()
    with busy(driver):
        with pytest.raises(TransferTimeoutError, match="could not commit in the time given: the engine is busy"):
            steps.run(commit)
        assert engine.get_metrics(timeout=60).core.state == "UPDATING"
    deadline = time.monotonic() + 60
    while engine.get_metrics().core.state != "RUNNING" and time.monotonic() < deadline:
        time.sleep(0.005)
    assert engine.get_metrics().core.state == "RUNNING" and not entered
    steps.begin()
    steps.end()


def test_a_deadline_that_is_far_costs_nothing(engine, driver, steps):
    steps.begin(math.inf)
    with pytest.raises(LifecycleError):
        steps.begin(math.inf)
    with steps.boundary(soon()):
        pass
    steps.end()
    assert engine.get_metrics().core.state == "RUNNING"
