"""Requests for policy versions do the same over every client: they wait, begin, are refused, and end with an update."""

import pytest

from rollout_engine import SamplingParams
from rollout_engine.base.errors import RequestError, RetryableError
from tests.conformance.running import (
    ENDLESS,
    SHORT,
    bring_back,
    ended,
    in_flight,
    last_of,
    step_until,
    told,
    told_of_sample,
    weights,
)


@pytest.fixture
def engine(engine):
    """It has the checkpoint's weights again for the next test."""
    yield engine
    bring_back(engine)
    engine.update_weights(weights(0))


def num_awaiting(engine):
    return engine.get_metrics().core.num_awaiting_version


def versions(sample):
    return {(span.policy_version, span.kv_min_version) for span in sample.version_spans}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["policy_version", "min_policy_version"])
def test_a_request_waits_for_its_version_while_others_are_computed(engine, same, name):
    live = engine.policy_version
    engine.add_request("later", "hello", SHORT, priority=-1, **{name: live + 1})
    step_until(engine, lambda: num_awaiting(engine) == 1)
    now = last_of(engine, "hello", SHORT)
    assert versions(now.outputs[0]) == {(live, live)} and engine.is_unfinished("later")
    engine.update_weights(weights(1))
    sample = ended(engine, "later")
    assert versions(sample) == {(live + 1, live + 1)} and num_awaiting(engine) == 0
    same([told(now), told_of_sample(sample)])


def test_a_pin_changes_no_bit(engine):
    live, params = engine.policy_version, SamplingParams(n=3, max_tokens=16, seed=5, logprobs=2)
    plain = told(last_of(engine, "hello", params))
    assert told(last_of(engine, "hello", params, policy_version=live)) == plain
    assert told(last_of(engine, "hello", params, min_policy_version=live)) == plain


def test_a_past_version_is_refused_and_a_later_one_if_it_is_not_to_wait(engine):
    engine.update_weights(weights(1))
    live = engine.policy_version
    with pytest.raises(RequestError, match=f"policy_version={live - 1} is not allowed: must be at least {live}"):
        last_of(engine, "hello", SHORT, policy_version=live - 1)
    with pytest.raises(RetryableError, match=f"policy_version={live + 1}, and the live version is {live}"):
        last_of(engine, "hello", SHORT.clone(version_wait="refuse"), min_policy_version=live + 1)
    for version in (live - 1, live + 1):
        output = last_of(engine, "hello", SHORT.clone(version_wait="end", n=2), policy_version=version)
        assert [(each.finish_reason, each.token_ids) for each in output.outputs] == [("abort", [])] * 2
        assert all(f"version {live} is live" in each.error for each in output.outputs)
    assert not engine.has_unfinished_requests()


@pytest.mark.quick(2)
@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_an_update_ends_a_pinned_request_with_its_tokens(engine, mode):
    live = engine.policy_version
    with in_flight(engine, params=ENDLESS, policy_version=live):
        engine.update_weights(weights(1), mode=mode)
        sample = ended(engine)
    assert sample.finish_reason == "abort" and versions(sample) == {(live, live)} and len(sample.token_ids) >= 3
    assert sample.error is None if mode == "abort" else f"version {live + 1} is live" in sample.error


def test_an_update_that_waits_for_requests_does_not_wait_for_those_that_wait_for_it(engine):
    live = engine.policy_version
    engine.add_request("later", "hello", SHORT, policy_version=live + 1)
    step_until(engine, lambda: num_awaiting(engine) == 1)
    engine.wait_for_requests_to_drain()
    engine.update_weights(weights(1), mode="wait", timeout=30.0)
    assert versions(ended(engine, "later")) == {(live + 1, live + 1)}


def test_pauses_and_sleeps_leave_it_waiting_and_an_abort_ends_it(engine):
    live = engine.policy_version
    for name in ("later", "never"):
        engine.add_request(name, "hello", SHORT, policy_version=live + 1)
    step_until(engine, lambda: num_awaiting(engine) == 2)
    engine.pause_generation(mode="abort")
    engine.resume_generation()
    engine.sleep(mode="wait")
    engine.wake_up()
    assert num_awaiting(engine) == 2
    engine.abort_request("never")
    assert ended(engine, "never").finish_reason == "abort" and num_awaiting(engine) == 1
    engine.sleep(level=2)
    engine.wake_up()
    engine.update_weights(weights(1))
    assert versions(ended(engine, "later")) == {(live + 1, live + 1)}
