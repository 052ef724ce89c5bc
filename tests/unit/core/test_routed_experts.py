"""Requests that return routed experts: which blocks they share, and which rows come when."""

import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.messages import NewSequence, SampleTask, ScheduledSequence, SchedulerOutput
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.core.fake_states import FakeKVError

ASKS = dict(return_routed_experts=True)


@pytest.mark.parametrize("first, second, num_cached", [(1, 1, 12), (0, 0, 12), (0, 1, 0), (1, 0, 0)])
def test_a_prefix_is_shared_by_requests_that_both_ask_or_both_do_not(make_rig, first, second, num_cached):
    rig = make_rig(block_size=4)
    rig.add("first", range(16), max_tokens=1, return_routed_experts=bool(first))
    rig.run()
    rig.add("second", range(16), max_tokens=3, return_routed_experts=bool(second))
    rig.run()
    assert rig.ends["second", 0].num_cached_tokens == num_cached
    rig.assert_clean()


def test_a_next_turn_finds_the_experts_of_the_whole_turn_before(make_rig):
    rig = make_rig(block_size=4)
    rig.add("first", range(10), max_tokens=7, **ASKS)
    rig.run()
    rig.add("next", [*range(10), *rig.tokens["first", 0], 5, 6], max_tokens=4, **ASKS)
    rig.run()
    assert rig.ends["next", 0].num_cached_tokens == 16
    rig.assert_clean()


def test_the_samples_of_a_prompt_share_its_rows(make_rig):
    rig = make_rig(max_num_seqs=2, max_num_batched_tokens=6)
    rig.add("group", range(21), n=5, max_tokens=6, **ASKS)
    rig.run()
    assert len(rig.prompt_routed["group"]) == 20
    rig.assert_clean()


def test_a_sequence_that_lost_its_blocks_reports_each_token_once(make_rig):
    rig = make_rig(num_blocks=8, block_size=4, max_num_seqs=4)
    rig.add("first", range(9), max_tokens=20, **ASKS)
    rig.add("second", range(50, 59), max_tokens=20, **ASKS)
    rig.run()
    assert rig.core.stats.num_preemptions > 0
    rig.assert_clean()


def test_an_aborted_request_has_the_rows_of_the_tokens_it_got(make_rig):
    rig = make_rig()
    rig.add("a", range(9), n=2, max_tokens=20, **ASKS)
    for _ in range(4):
        rig.step()
    rig.abort("0_a")
    rig.step()
    rig.abort("a")
    rig.run()
    assert rig.tokens["a", 0] and len(rig.tokens["a", 1]) > len(rig.tokens["a", 0])
    rig.assert_clean()


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_over_an_update_each_row_comes_once_with_its_token(make_rig, kv):
    rig = make_rig(max_num_batched_tokens=8)
    rig.add("a", range(20), max_tokens=9, **ASKS)
    for _ in range(2):  # amid the prompt, and then amid the completion
        rig.step()
        rig.step()
        rig.update(kv=kv)
    rig.run()
    rig.assert_clean()


def test_nothing_comes_where_nobody_asks(make_rig):
    rig = make_rig()
    rig.add("a", range(9))
    outputs = rig.core.step()
    assert outputs.routed_experts is None and outputs.prompt_routed_experts == {}


def test_a_model_without_routers_refuses_to_return_them(make_rig_in_turn):
    rig = make_rig_in_turn(routing=None)
    with pytest.raises(RequestError, match="return_routed_experts=True is not allowed: must be False.*no routers"):
        rig.add("a", **ASKS)


def test_the_fake_model_notices_tokens_that_were_not_recorded(make_rig_in_turn):
    executor = make_rig_in_turn().executor
    work = dict(policy_version=0, finished_sequence_ids=[], block_copies=[], samples=[])
    plain = NewSequence(1, [3, 4, 5], 3, SamplingParams(), 0)
    executor.execute(SchedulerOutput(step=0, new=[plain], scheduled=[ScheduledSequence(1, 0, 2, [0])], **work))
    asks = NewSequence(2, [3, 4, 5], 3, SamplingParams(**ASKS), 0)
    scheduled = [ScheduledSequence(2, 2, 1, [0])]
    with pytest.raises(FakeKVError, match="the experts of some prompt tokens were not recorded"):
        executor.execute(
            SchedulerOutput(step=1, new=[asks], scheduled=scheduled, **work | {"samples": [SampleTask(2, 0)]})
        )
