"""Calls that wait for a later step: what a step costs with many of them, and when each is over."""

import itertools
import math
import random
from types import SimpleNamespace

import pytest

from rollout_engine.engine import calls
from rollout_engine.engine.calls import Call, CallFuture, WaitingCalls
from rollout_engine.engine.verbs import VERBS

DRAIN, PAUSE, SLEEP = (VERBS[name] for name in ("wait_for_requests_to_drain", "pause_generation", "sleep"))


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests set."""
    clock = SimpleNamespace(now=0.0)
    time = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: 0.0)
    monkeypatch.setattr(calls, "time", time)
    return clock


class Looks:
    """Counts the looks at whether a verb is over; `over` has the names of those that are."""

    def __init__(self, *over):
        self.over, self.count = set(over), 0

    def __call__(self, verb):
        self.count += 1
        return verb.name in self.over


@pytest.mark.slow
def test_a_step_looks_once_at_each_verb_however_many_calls_wait(clock):
    waiting, looks = WaitingCalls(), Looks()
    for verb, _ in itertools.product((DRAIN, PAUSE), range(10_000)):
        waiting.add(Call(verb, {}, deadline=1000.0))
    for step in range(1, 100):
        assert waiting.pop(looks) == [] and looks.count == 2 * step
    looks.over.add("pause_generation")
    assert len(waiting.pop(looks)) == len(waiting) == 10_000


def test_cancelled_calls_are_gone_with_the_next_look(clock):
    waiting, looks = WaitingCalls(), Looks()
    futures = [CallFuture() for _ in range(20_000)]
    for future in futures:
        waiting.add(Call(DRAIN, {}, future, deadline=1000.0))
    assert all(future.cancel() for future in futures)
    assert waiting.pop(looks) == [] and (len(waiting), looks.count) == (0, 0)
    assert not (waiting._by_verb or waiting._by_deadline or waiting._cancelled)


def test_calls_leave_when_they_are_over_late_or_cancelled_and_only_then(clock):
    dice, waiting, looks, expected = random.Random(5), WaitingCalls(), Looks(), {}
    for _ in range(3000):
        match dice.randrange(5):
            case 0 | 1:
                deadline = dice.choice([None, clock.now + dice.randrange(9), math.inf])
                call = Call(dice.choice([DRAIN, PAUSE, SLEEP]), {}, deadline=deadline)
                waiting.add(call)
                expected[call] = None
            case 2 if expected:
                call = dice.choice(list(expected))
                assert call.future.cancel()
                del expected[call]
            case 3:
                clock.now += dice.random() * 2
            case 4:
                looks.over = {verb.name for verb in (DRAIN, PAUSE, SLEEP) if dice.random() < 0.05}
                popped = waiting.pop(looks)
                due = [call for call in expected if call.verb.name in looks.over or call.is_late]
                assert len(popped) == len(due) and set(popped) == set(due)
                for call in due:
                    del expected[call]
                assert len(waiting) == len(expected)


def test_a_future_takes_one_outcome_and_none_once_it_is_cancelled():
    ended, cancelled = CallFuture(), CallFuture()
    assert ended.begin()
    ended.succeed(1)
    ended.fail(KeyError())
    ended.succeed(2)
    assert ended.result() == 1 and not ended.cancel()
    assert cancelled.cancel() and not cancelled.begin()
    cancelled.succeed(1)
    cancelled.fail(KeyError())
    assert cancelled.cancelled()


def test_a_call_that_has_begun_can_be_cancelled_too():
    future = CallFuture()
    assert future.begin() and future.cancel() and future.begun
