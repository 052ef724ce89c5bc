"""Forwards on their way through a pipe of stages, with a list in place of the pipe."""

from types import SimpleNamespace

import pytest

from rollout_engine.base.messages import ScheduledSequence, SchedulerOutput
from rollout_engine.execution.step_feed import StepFeed
from rollout_engine.model.ranks.pipe_memory import num_places

NUM_STAGES = 2


@pytest.fixture
def sent():
    return []


@pytest.fixture
def feed(sent):
    pipe = SimpleNamespace(serial=-1, num_stages=NUM_STAGES, inbox=SimpleNamespace(wait_for=lambda serial: None))
    feed = StepFeed(pipe, lambda work, tokens, serial: sent.append(serial))
    feed._token_ids[0] = [5, 6, 7]
    return feed


def step():
    return SchedulerOutput(0, 0, [], [], [], [ScheduledSequence(0, 0, 3, [], 0, [])], [])


def test_steps_behind_one_that_failed_keep_no_place(feed, sent):
    """Rank 0 does not ask for them; scores follow, and no step that would say so."""
    serials = [feed.announce(step()) for _ in range(NUM_STAGES)]
    feed.begin(serials[0])  # it fails
    for number in range(3 * num_places(NUM_STAGES)):
        assert feed.begin_other() == NUM_STAGES + number
    assert sent == serials


def test_a_step_that_may_still_be_computed_keeps_its_place(feed):
    feed.announce(step())
    for _ in range(num_places(NUM_STAGES) - 1):
        feed.book()
    with pytest.raises(AssertionError, match="more forwards are in flight than belts have places"):
        feed.book()
