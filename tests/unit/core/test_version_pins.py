"""Requests that ask for policy versions: they wait for them, begin under them, and end with them."""

import random

import pytest

from rollout_engine import SamplingParams
from rollout_engine.base.errors import RequestError, RetryableError
from rollout_engine.base.messages import EngineCoreRequest
from tests.unit.core.random_operations import SHAPES, Monkey


@pytest.fixture
def rig(make_rig):
    return make_rig(policy_version=3)


def reasons(rig):
    return {rig.label(id): end.finish_reason for id, key in rig.keys.items() if (end := rig.ends.get(key))}


def versions_of(rig, name):
    """The versions that drew the tokens of a request, and the oldest KV of each."""
    ids = rig.ids(name)
    return {drawn for (sequence_id, _), drawn in rig.drawn.items() if sequence_id in ids}


@pytest.mark.parametrize("pin", [{"policy_version": 3}, {"min_policy_version": 3}, {"min_policy_version": 0}])
def test_a_request_for_the_live_version_is_computed_as_any_other(rig, pin):
    rig.add("a", n=2, **pin)
    rig.run()
    assert set(reasons(rig).values()) == {"length"}
    rig.assert_clean()


@pytest.mark.parametrize("pin", [{"policy_version": 4}, {"min_policy_version": 4}])
def test_a_request_for_a_later_version_waits_and_holds_nobody_up(rig, pin):
    rig.add("later", priority=-5, n=2, **pin)
    rig.add("now")
    while rig.core.can_progress():
        rig.step()
    assert reasons(rig) == {"now": "length"} and not versions_of(rig, "later")
    assert rig.core.has_unfinished_requests() and rig.core.num_in_flight == 0
    metrics = rig.core.metrics()
    assert (metrics.num_requests, metrics.num_waiting, metrics.num_awaiting_version) == (1, 2, 2)
    rig.update()
    assert rig.core.metrics().num_awaiting_version == 0
    rig.run()
    assert versions_of(rig, "later") == {(4, 4)}
    rig.assert_clean()


def test_requests_that_have_waited_begin_by_priority_and_arrival(make_rig):
    rig = make_rig(policy_version=3, max_num_seqs=1)
    rig.add("third", min_policy_version=4)
    rig.add("first", policy_version=4, priority=-1)
    rig.update(breaks_off=True)
    assert rig.core.metrics().num_awaiting_version == 2
    rig.update()
    rig.add("fourth")
    rig.run()
    assert [rig.label(each) for each in dict.fromkeys(id for id, _ in rig.drawn)] == ["first", "third", "fourth"]
    rig.assert_clean()


def test_a_version_that_is_past_is_refused_and_nothing_of_the_request_stays(rig):
    with pytest.raises(RequestError, match="policy_version=2 is not allowed: must be at least 3, the live one") as told:
        rig.add("a", policy_version=2)
    assert told.value.field == "policy_version" and rig.core.num_unfinished_requests == 0


def test_a_later_version_is_refused_for_now_if_the_request_does_not_wait(rig):
    for pin in ({"policy_version": 4}, {"min_policy_version": 4}):
        with pytest.raises(RetryableError, match="policy_version=4, and the live version is 3"):
            rig.add("a", version_wait="refuse", **pin)
    rig.update()
    rig.add("a", version_wait="refuse", policy_version=4)
    rig.run()
    rig.assert_clean()


@pytest.mark.parametrize("pin", [{"policy_version": 2}, {"policy_version": 4}, {"min_policy_version": 4}])
def test_with_version_wait_end_a_request_out_of_range_ends_without_a_token(rig, pin):
    rig.add("a", version_wait="end", n=3, **pin)
    rig.step()
    assert reasons(rig) == {"0_a": "abort", "1_a": "abort", "2_a": "abort"}
    assert all("version 3 is live" in end.error for end in rig.ends.values())
    rig.assert_clean()


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_an_update_ends_all_samples_of_a_pinned_request_and_no_other(rig, kv):
    rig.add("pinned", n=3, policy_version=3, max_tokens=20)
    rig.add("least", min_policy_version=3, max_tokens=20)
    rig.add("any", max_tokens=20)
    for _ in range(5):
        rig.step()
    rig.update(kv=kv)
    rig.step()
    assert reasons(rig) == {f"{index}_pinned": "abort" for index in range(3)}
    assert all(
        "policy_version=3, and version 4 is live" in end.error and len(rig.tokens[key]) >= 4
        for key, end in rig.ends.items()
    )
    rig.run()
    assert versions_of(rig, "pinned") == {(3, 3)} and len(versions_of(rig, "least")) == 2
    rig.assert_clean()


def test_a_pinned_request_that_is_queued_behind_others_ends_too(make_rig):
    rig = make_rig(policy_version=3, max_num_seqs=1)
    rig.add("runs", max_tokens=20)
    rig.add("queued", policy_version=3)
    rig.step()
    rig.update()
    rig.run()
    assert reasons(rig) == {"runs": "length", "queued": "abort"} and not rig.tokens["queued", 0]
    rig.assert_clean()


def test_pauses_and_updates_that_drain_or_abort_leave_it_waiting(rig):
    rig.add("later", policy_version=5)
    rig.add("now", max_tokens=30)
    rig.step()
    rig.pause("wait")
    while rig.core.can_progress():
        rig.step()
    assert not rig.core.lifecycle.draining and reasons(rig) == {"now": "length"}
    rig.resume()
    rig.pause("abort")
    rig.sleep(1, "abort")
    rig.wake_up()
    rig.update()
    assert rig.core.metrics().num_awaiting_version == 1
    rig.core.begin_update()
    assert rig.core.close_for_update("abort").ended == []
    rig.core.quiesce()
    rig.commit(5)
    assert rig.step() == [], "paused"
    rig.core.end_update(dirty=False)
    assert rig.core.metrics().num_awaiting_version == 0
    rig.resume()
    rig.run()
    assert versions_of(rig, "later") == {(5, 5)}
    rig.assert_clean()


def test_one_that_was_held_by_a_pause_ends_when_its_version_passes(rig):
    rig.pause("keep")
    rig.add("held", policy_version=3)
    rig.add("later", policy_version=4)
    rig.update()
    rig.update()
    rig.step()
    assert reasons(rig) == {"held": "abort", "later": "abort"}
    rig.resume()
    rig.assert_clean()


def test_it_can_be_aborted_while_it_waits(rig):
    rig.add("later", n=2, policy_version=4)
    rig.abort("later")
    assert set(reasons(rig).values()) == {"abort"}
    rig.assert_clean()


def test_a_drain_is_complete_when_an_update_ends_the_last_request(rig):
    rig.add("pinned", policy_version=3, max_tokens=30)
    rig.step()
    rig.pause("wait")
    rig.update()
    rig.step()
    assert reasons(rig) == {"pinned": "abort"} and not rig.core.lifecycle.draining
    rig.resume()
    rig.assert_clean()


def test_versions_that_begin_again_end_what_is_in_flight_and_leave_the_rest_waiting(rig):
    rig.add("exact", policy_version=3, max_tokens=30)
    rig.add("least", min_policy_version=2, max_tokens=30)
    rig.add("later", min_policy_version=5)
    rig.step()
    rig.commit(3)  # other weights under the same number
    rig.step()
    assert reasons(rig) == {"exact": "abort"}
    rig.commit(1)
    rig.step()
    assert reasons(rig) == {"exact": "abort", "least": "abort"}
    rig.commit(6)
    rig.run()
    assert reasons(rig)["later"] == "length"
    rig.assert_clean()


@pytest.mark.parametrize("pin", [{"policy_version": 3}, {"policy_version": 5}, {"min_policy_version": 5}])
def test_the_rest_of_a_request_from_another_engine_ends_out_of_range_with_the_tokens_it_had(rig, pin):
    rig.update()
    request = EngineCoreRequest(
        prompt_token_ids=[1, 2],
        params=SamplingParams(**pin),
        max_tokens=9,
        seed=1,
        first_sequence_id=0,
        output_token_ids=[5],
    )
    rig.core.add_request(request)
    (end,) = rig.core.step().ended
    assert end.finish_reason == "abort" and "version 4 is live" in end.error
    rig.core.check_integrity()


@pytest.mark.parametrize("pin, ends", [({"policy_version": 3}, True), ({"min_policy_version": 3}, False), ({}, False)])
def test_the_rest_of_a_request_that_is_held_ends_if_its_version_is_pushed_again(rig, pin, ends):
    rig.core.pause("keep")
    rest = {"max_tokens": 9, "seed": 1, "first_sequence_id": 0, "output_token_ids": [5]}
    rig.core.add_request(EngineCoreRequest(prompt_token_ids=[1, 2], params=SamplingParams(**pin), **rest))
    rig.core.begin_update()
    rig.core.commit_version(3)
    rig.core.end_update(dirty=False)
    assert [end.finish_reason for end in rig.core.step().ended] == ["abort"] * ends
    rig.core.check_integrity()


class PinningMonkey(Monkey):
    """Adds requests of which most ask for a version."""

    def add(self):
        live, choose = self.rig.core.policy_version, random.Random(self.random.randrange(2**32))
        params = choose.choice(
            [
                {},
                {"policy_version": max(0, live + choose.choice([0, 0, 1, 1, 2, -1]))},
                {"min_policy_version": max(0, live + choose.choice([0, 1, -3, 2]))},
            ]
        )
        params["version_wait"] = choose.choice(["wait", "wait", "refuse", "end"])
        add = self.rig.add
        self.rig.add = lambda *args, **fields: add(*args, **(fields if "pooling" in fields else fields | params))
        try:
            super().add()
        except RequestError:
            assert params.get("policy_version", live) < live
        except RetryableError:
            assert params["version_wait"] == "refuse"
        finally:
            self.rig.add = add


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seeds", [[0], pytest.param(range(1, 8), marks=pytest.mark.slow)], ids=["one", "more"])
def test_random_pins_are_kept_to_the_token(make_rig, shape, ahead, seeds):
    for seed in seeds:
        rig = make_rig(policy_version=3, async_scheduling=ahead, **shape)
        monkey = PinningMonkey(rig, seed)
        for _ in range(300):
            monkey.act()
        last = max([rig.core.policy_version, *(pin for each in rig.requests.values() for pin in range_of(each))])
        while rig.core.has_unfinished_requests():
            while rig.core.can_progress():
                rig.step()
            if rig.core.policy_version <= last:
                rig.commit(rig.core.policy_version + 1)
        for (sequence_id, _), (version, oldest) in rig.drawn.items():
            params = rig.requests[rig.keys[sequence_id][0]].params
            if params.policy_version is not None:
                assert version == oldest == params.policy_version
            if params.min_policy_version is not None:
                assert version >= oldest >= params.min_policy_version
        rig.assert_clean()


def range_of(request):
    """The versions that a request names."""
    named = request.params.policy_version, request.params.min_policy_version
    return [version for version in named if version is not None]
