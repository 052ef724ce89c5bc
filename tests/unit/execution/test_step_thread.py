import threading

import pytest

from rollout_engine.base.errors import RetryableError
from rollout_engine.execution.step_thread import StepThread
from tests.integration.sample_extensions import refuse_thread


@pytest.fixture
def thread():
    thread = StepThread()
    yield thread
    thread.close()


def test_steps_run_in_order_beside_their_submitter(thread):
    may_go, ran = threading.Event(), []
    first = thread.submit(lambda: (may_go.wait(), ran.append(1)))
    second = thread.submit(lambda: ran.append(2))
    assert ran == []
    may_go.set()
    second()
    assert ran == [1, 2]
    first()


def test_waiting_until_idle_includes_steps_whose_result_nobody_asks_for(thread):
    ran = []
    for number in range(3):
        thread.submit(lambda number=number: ran.append(number))
    thread.wait_until_idle()
    assert ran == [0, 1, 2]
    thread.wait_until_idle()


def test_nothing_runs_when_a_step_has_failed(thread):
    ran = []

    def fail():
        raise OSError("device lost")

    failed = thread.submit(fail)
    thread.submit(lambda: ran.append("behind"))
    with pytest.raises(OSError, match="device lost"):
        failed()
    assert ran == ["behind"]


def test_nothing_runs_when_the_wait_for_a_step_was_interrupted(thread, monkeypatch):
    may_go, ran = threading.Event(), []
    wait = thread.submit(lambda: (may_go.wait(), ran.append(1)))
    future = wait.args[0]

    def interrupted():
        may_go.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert ran == [1]


def test_its_thread_ends_with_it():
    others = threading.enumerate()
    thread = StepThread()
    ours = [each for each in threading.enumerate() if each.name.startswith("steps") and each not in others]
    assert ours
    thread.close()
    assert not any(each.is_alive() for each in ours)


def test_without_a_thread_there_are_no_steps(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", refuse_thread)
    with pytest.raises(RetryableError, match="'steps' cannot start"):
        StepThread()
