"""What a fleet's brain decides. tests/simulation has storms of random events for it."""

import msgspec
import numpy as np
import pytest

from rollout_engine import PoolingParams, SamplingParams
from rollout_engine.base.errors import RetryableError
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, Pooled, SequenceEnd
from rollout_engine.fleet.plan.actions import Abort, CatchUp, Fail, Send, Start, Stop
from rollout_engine.fleet.plan.balancer import Balancer
from rollout_engine.fleet.plan.brain import Brain
from rollout_engine.fleet.plan.replica_state import MAX_FAILURES


def request_of(first, n=1):
    """A request of n samples."""
    return EngineCoreRequest(
        prompt_token_ids=[3], params=SamplingParams(n=n), max_tokens=5, seed=1, first_sequence_id=first
    )


def serving(num_replicas):
    """A brain whose replicas all serve."""
    brain = Brain(Balancer("round-robin"), num_replicas)
    for index in range(num_replicas):
        brain.note_start(index, 0, 0.0)
    return brain


def test_without_a_replica_requests_wait_and_with_none_left_they_fail():
    brain = Brain(Balancer(), 1)
    request = request_of(0)
    assert brain.add_request(request) == []
    assert brain.note_start(0, 0, 0.0) == [Send(0, request)]
    now, actions = 0.0, brain.note_loss(0, "killed", 0.0)
    waits = []
    while isinstance(actions[0], Start):
        waits.append(actions[0].at - now)
        now = actions[0].at
        actions = brain.note_loss(0, "no memory", now)
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert isinstance(actions[0], Fail) and "replica 0: no memory" in actions[0].reason


def test_a_replica_that_has_served_for_long_is_started_at_once_again():
    brain = Brain(Balancer(), 2)
    now = 0.0
    for _ in range(50):
        for index in range(2):
            brain.note_start(index, 0, now)
        now += 100.0
        for index in range(2):
            assert brain.note_loss(index, "killed", now) == [Start(index, now)]


def test_a_replica_that_could_not_catch_up_and_starts_anew_is_heard_again():
    brain = serving(2)
    assert brain.add_request(request_of(7)) == [Send(0, request_of(7))]
    brain.note_commit([1], 1, 0.0)  # replica 0 has missed it: its request continues at replica 1
    problems = [brain.note_failed_catch_up(0, "the disk is broken", 0.0) for _ in range(MAX_FAILURES)]
    assert problems[-1] == [Stop(0), Start(0, 0.0)]
    brain.note_start(0, -1, 0.0)
    brain.has_weights(0, 1, 0.0)
    brain.note_loss(1, "killed", 0.0)  # and comes back to replica 0, which is another engine now
    outputs = EngineCoreOutputs(
        1, sequence_ids=[7], token_ids=[5], kv_min_versions=[1], ended=[SequenceEnd(7, "length")]
    )
    brain.note_outputs(0, outputs)
    assert outputs.sequence_ids == [7] and len(outputs.ended) == 1
    assert not len(brain.ledger)


def test_nothing_is_kept_of_a_replica_that_is_scaled_away_as_it_lags():
    brain = serving(2)
    brain.add_request(request_of(0)), brain.add_request(request_of(1))
    brain.note_commit([0], 1, 0.0)
    assert brain.scale_to(1, 0.0) == [Stop(1)]
    assert not any(brain.ledger._foreign.values())


def test_a_pooling_request_of_a_lost_replica_begins_again_and_what_the_old_one_says_is_dropped():
    brain = serving(2)
    request = msgspec.structs.replace(request_of(0), max_tokens=0, pooling=PoolingParams())
    (sent,) = brain.add_request(request)
    brain.note_commit([1 - sent.replica], 1, 0.0)  # its replica has missed an update
    late = EngineCoreOutputs(0, pooled={0: Pooled(np.zeros(2, np.float32), 0)}, ended=[SequenceEnd(0, "stop")])
    brain.note_outputs(sent.replica, late)
    assert late.pooled == {} and late.ended == [] and brain.ledger.get(0).request is request
    result = EngineCoreOutputs(1, pooled={0: Pooled(np.ones(2, np.float32), 1)}, ended=[SequenceEnd(0, "stop")])
    brain.note_outputs(1 - sent.replica, result)
    assert 0 in result.pooled and not len(brain.ledger)


def test_requests_that_wait_are_spread_over_all_replicas_that_an_update_brings_back():
    brain = serving(3)
    assert brain.note_commit([], 1, 0.0) == [CatchUp(0, 0.0), CatchUp(1, 0.0), CatchUp(2, 0.0)]
    for first in range(3):
        assert brain.add_request(request_of(first)) == []
    sent = brain.note_commit([0, 1, 2], 2, 0.0)
    assert [action.replica for action in sent] == [0, 1, 2]


def refused_where_it_is(brain, first):
    """What comes of a refusal by the replica that has a request; and which one that was."""
    holder = brain.ledger.get(first).replica
    told, actions = brain.note_refusal(first, holder, others_may=True)
    brain.check_integrity()
    return holder, told, actions


def test_a_request_that_replicas_refuse_is_tried_at_each_that_serves_before_its_user_is_told():
    brain, request = serving(3), request_of(0)
    brain.note_loss(2, "killed", 0.0)
    (first,) = brain.add_request(request)
    holder, told, actions = refused_where_it_is(brain, 0)
    assert first == Send(holder, request) and told is None
    assert actions == [Abort(holder, [0]), Send(1 - holder, request)]
    other, told, actions = refused_where_it_is(brain, 0)
    assert (other, told, actions) == (1 - holder, 0, [Abort(1 - holder, [0])])
    assert not len(brain.ledger)
    brain.balancer.check_integrity()


def test_a_request_that_was_taken_after_all_may_go_where_it_was_refused_once_its_replica_is_lost():
    brain, request = serving(2), request_of(0)
    brain.add_request(request)
    holder, _, _ = refused_where_it_is(brain, 0)
    assert brain.note_loss(1 - holder, "killed", 0.0) == [Start(1 - holder, 0.0), Send(holder, request)]
    assert refused_where_it_is(brain, 0)[:2] == (holder, 0), "nobody else serves"


def test_the_rest_of_a_request_is_tried_elsewhere_with_its_other_samples():
    brain = serving(3)
    brain.add_request(request_of(0, n=2))
    first = brain.ledger.get(0).replica
    brain.note_outputs(first, EngineCoreOutputs(0, sequence_ids=[0, 1], token_ids=[5, 6]))
    sent = [action for action in brain.note_loss(first, "it received SIGTERM", 0.0) if isinstance(action, Send)]
    assert [send.request.output_token_ids for send in sent] == [[5], [6]]
    holder, told, actions = refused_where_it_is(brain, 1)
    assert told is None and actions[0] == Abort(holder, [0, 1])
    assert [(send.replica in (first, holder), send.request.output_token_ids) for send in actions[1:]] == [
        (False, [5]),
        (False, [6]),
    ]
    assert brain.note_refusal(0, holder, others_may=True) == (None, []), "it continues elsewhere"


def test_a_group_is_replaced_once_all_of_the_new_one_serve():
    brain, planned = serving(2), []
    assert brain.add_request(request_of(1)) == [Send(0, request_of(1))]
    assert brain.replace_all(2, planned.append, 5.0) == [Start(2, 5.0), Start(3, 5.0)] and planned == [(2, 3)]
    assert brain.note_start(2, 0, 6.0) == [] and brain.settle_replacement(6.0) == []
    assert brain.serving == [0, 1], "requests do not wait at half a group"
    assert brain.add_request(request_of(2)) == [Send(1, request_of(2))]
    brain.check_integrity()
    assert brain.note_start(3, 0, 7.0) == []
    actions = brain.settle_replacement(7.0)
    assert [each for each in actions if isinstance(each, Stop)] == [Stop(index, answers_first=True) for index in (0, 1)]
    assert {each.replica for each in actions if isinstance(each, Send)} <= {2, 3}
    assert [each.request.first_sequence_id for each in actions if isinstance(each, Send)] == [1, 2]
    assert brain.serving == brain.wanted == [2, 3]
    brain.check_integrity()
    assert brain.settle_replacement(8.0) == []


def test_a_group_stays_if_the_new_one_does_not_start():
    brain = serving(2)
    brain.replace_all(1, lambda indexes: None, 0.0)
    with pytest.raises(RetryableError, match="scale: the last change"):
        brain.replace_all(3, lambda indexes: None, 0.0)
    for _ in range(MAX_FAILURES):
        assert brain.serving == [0, 1]
        brain.note_loss(2, "no memory", 0.0)
    assert brain.settle_replacement(0.0) == [] and brain.serving == brain.wanted == [0, 1]
    brain.check_integrity()
    assert brain.replace_all(3, lambda indexes: None, 0.0)[0] == Start(3, 0.0)


def test_a_version_that_a_new_group_has_not_got_yet_is_waited_for():
    brain = serving(1)
    brain.note_commit([0], 1, 0.0)
    brain.replace_all(2, lambda indexes: None, 0.0)
    for index in (1, 2):
        assert brain.note_start(index, -1, 0.0) == [CatchUp(index, 0.0)] and brain.settle_replacement(0.0) == []
    brain.has_weights(1, 1, 0.0)
    assert brain.settle_replacement(0.0) == [] and brain.serving == [0]
    brain.has_weights(2, 1, 0.0)
    assert Stop(0, answers_first=True) in brain.settle_replacement(0.0) and brain.serving == [1, 2]
    brain.check_integrity()
