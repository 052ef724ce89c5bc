"""Engines that divide experts fall asleep behind the requests of all, by two calls in place of one."""

import pytest

from rollout_engine.base.errors import DrainTimeoutError
from rollout_engine.engine.calls import CallFuture
from rollout_engine.fleet.run.group_sleep import sleep_together, sleeps_behind_requests

ARGUMENTS = dict(level=2, mode="wait", drain_timeout=5.0)


@pytest.fixture
def made():
    """(arguments, future) of each call of all engines."""
    return []


@pytest.fixture
def result(made):
    def call(name, arguments):
        assert name == "sleep"
        future = CallFuture()
        future.begin()
        made.append((arguments, future))
        return future

    return sleep_together(call, ARGUMENTS)


def test_memory_is_released_once_all_have_ended_their_requests(made, result):
    assert [arguments for arguments, _ in made] == [ARGUMENTS | dict(level=0)]
    made[0][1].succeed(None)
    assert made[1][0] == ARGUMENTS | dict(mode="keep") and not result.done()
    made[1][1].succeed(None)
    assert result.result(0) is None


def test_requests_that_do_not_end_in_time_are_its_error(made, result):
    made[0][1].fail(DrainTimeoutError("too late"))
    with pytest.raises(DrainTimeoutError, match="too late"):
        result.result(0)
    assert len(made) == 1


def test_taken_back_it_releases_nothing(made, result):
    result.cancel()
    assert made[0][1].cancelled() and len(made) == 1


@pytest.mark.parametrize(
    "name, arguments", [("sleep", dict(level=0, mode="wait")), ("sleep", dict(level=1, mode="abort")), ("wake_up", {})]
)
def test_other_calls_are_one(name, arguments):
    assert not sleeps_behind_requests(name, arguments)
    assert sleeps_behind_requests("sleep", ARGUMENTS)
