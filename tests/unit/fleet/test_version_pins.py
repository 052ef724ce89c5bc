"""What a fleet's brain does with requests for policy versions: it holds them, or sends them, or ends them."""

import msgspec
import pytest

from rollout_engine import SamplingParams
from rollout_engine.base.errors import RequestError, RetryableError
from rollout_engine.base.messages import EngineCoreOutputs, SequenceEnd
from rollout_engine.fleet.plan.actions import Abort, CatchUp, Send, Start, Stop, Tell
from tests.unit.fleet.test_brain import request_of, serving


def pinned(first, n=1, **pin):
    """A request of n samples for a version."""
    return msgspec.structs.replace(request_of(first, n), params=SamplingParams(n=n, **pin))


def ends_of(actions):
    """Ids and reasons of the ends that a user is told."""
    return [(end.sequence_id, end.finish_reason) for each in actions if isinstance(each, Tell) for end in each.ended]


@pytest.mark.parametrize("pin", [{"policy_version": 1}, {"min_policy_version": 1}])
def test_a_request_for_a_later_version_waits_for_the_commit_without_being_anyones_load(pin):
    brain, later = serving(2), pinned(0, n=2, **pin)
    assert brain.add_request(later) == []
    assert brain.add_request(request_of(2)) == [Send(0, request_of(2))]
    assert sum(brain.balancer.stats.num_requests.values()) == 1
    brain.check_integrity()
    assert brain.scale_to(1, 0.0) == [Stop(1)], "nothing holds up a replica that is to go"
    assert brain.note_commit([0], 1, 0.0) == [Send(0, later)]
    brain.check_integrity()


def test_one_for_the_live_version_is_sent_and_one_for_a_past_version_refused():
    brain = serving(1)
    brain.note_commit([0], 3, 0.0)
    request = pinned(0, policy_version=3)
    assert brain.add_request(request) == [Send(0, request)]
    with pytest.raises(RequestError, match="policy_version=2 is not allowed: must be at least 3"):
        brain.add_request(pinned(1, policy_version=2))
    with pytest.raises(RetryableError, match="min_policy_version=4, and the live version is 3"):
        brain.add_request(pinned(1, min_policy_version=4, version_wait="refuse"))
    assert ends_of(brain.add_request(pinned(1, n=2, policy_version=4, version_wait="end"))) == [
        (1, "abort"),
        (2, "abort"),
    ]
    assert len(brain.ledger) == 1
    brain.check_integrity()


def test_the_pin_goes_along_when_a_replica_is_lost():
    brain, request = serving(2), pinned(0, policy_version=0)
    (sent,) = brain.add_request(request)
    brain.note_outputs(sent.replica, EngineCoreOutputs(0, sequence_ids=[0], token_ids=[9], kv_min_versions=[0]))
    start, again = brain.note_loss(sent.replica, "killed", 0.0)
    assert isinstance(start, Start) and again.replica == 1 - sent.replica
    assert again.request.params.policy_version == 0 and again.request.output_token_ids == [9]


@pytest.mark.parametrize("has_token", [False, True])
def test_a_request_of_a_replica_that_missed_the_commit_ends_with_the_tokens_it_has(has_token):
    brain = serving(2)
    (sent,) = brain.add_request(pinned(0, n=2, policy_version=0))
    if has_token:
        brain.note_outputs(sent.replica, EngineCoreOutputs(0, sequence_ids=[0], token_ids=[9], kv_min_versions=[0]))
    actions = brain.note_commit([1 - sent.replica], 1, 0.0)
    assert ends_of(actions) == [(0, "abort"), (1, "abort")]
    assert Abort(sent.replica, [0, 1]) in actions and CatchUp(sent.replica, 0.0) in actions
    late = EngineCoreOutputs(0, sequence_ids=[0], token_ids=[8], kv_min_versions=[0], ended=[SequenceEnd(1, "abort")])
    brain.note_outputs(sent.replica, late)
    assert late.sequence_ids == [] and late.ended == [], "what the old replica says is dropped"
    assert not any(brain.balancer.stats.num_requests.values())
    brain.check_integrity()


def test_one_whose_version_an_update_leaps_over_ends_without_a_token():
    brain = serving(1)
    assert brain.add_request(pinned(0, policy_version=1)) == []
    actions = brain.note_commit([0], 2, 0.0)
    assert ends_of(actions) == [(0, "abort")] and "version 2 is live" in actions[0].ended[0].error
    assert not len(brain.ledger)
    brain.check_integrity()


def test_one_that_is_to_begin_at_a_replica_does_so_once_its_version_is_live():
    brain, request = serving(3), pinned(0, min_policy_version=2)
    assert brain.add_request(request, None, 2) == []
    assert brain.note_commit([0, 1, 2], 1, 0.0) == []
    assert brain.note_commit([0, 1, 2], 2, 0.0) == [Send(2, request)]
    lost = pinned(1, min_policy_version=3)
    assert brain.add_request(lost, None, 2) == []
    brain.note_loss(2, "killed", 0.0)
    assert [type(each) for each in brain.note_commit([0, 1], 3, 0.0)] == [Send], "another one takes its place"


def test_samples_of_a_waiting_request_still_wait_when_one_of_them_is_aborted():
    brain = serving(1)
    brain.add_request(pinned(0, n=3, min_policy_version=2))
    assert ends_of(brain.abort_sequences([1])) == [(1, "abort")]
    assert brain.note_commit([0], 1, 0.0) == []
    sent = brain.note_commit([0], 2, 0.0)
    assert [each.request.first_sequence_id for each in sent] == [0, 2]
    brain.check_integrity()


def test_waiting_ones_are_aborted_and_all_are_told_of_the_end_of_the_fleet():
    brain = serving(1)
    brain.add_request(pinned(0, n=2, policy_version=1))
    assert ends_of(brain.abort_sequences([0, 1])) == [(0, "abort"), (1, "abort")]
    brain.add_request(pinned(2, policy_version=1))
    brain.scale_to(0, 0.0)
    assert brain.is_dead
