"""Requests that pool their prompts: in the same steps as others, over chunks, preemption, updates and failures."""

import numpy as np
import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.base.pooling_params import PoolingParams
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.core.result_processor import BAD_STATES

LAST, MEAN, TOKEN = (PoolingParams(kind=kind) for kind in ("last", "mean", "token"))


def rows(rig):
    return [{rig.label(row.sequence_id): row.num_scheduled_tokens for row in work.scheduled} for work in rig.works]


def test_a_prompt_is_pooled_beside_others_and_ends_without_a_token(make_rig_in_turn):
    rig = make_rig_in_turn()
    rig.add("generates", range(5), max_tokens=3)
    rig.add("pools", range(9), pooling=MEAN)
    rig.run()
    assert rows(rig)[0] == {"generates": 5, "pools": 9} and not any("pools" in step for step in rows(rig)[1:])
    end = rig.ends["pools", 0]
    assert (end.finish_reason, rig.tokens["pools", 0]) == ("stop", [])
    assert rig.core.stats.num_tokens_sampled == 3
    rig.assert_clean()


def test_a_long_prompt_is_pooled_over_its_chunks(make_rig_in_turn):
    rig = make_rig_in_turn(max_num_batched_tokens=8)
    rig.add("pools", range(30), pooling=TOKEN)
    rig.run()
    assert rows(rig) == [{"pools": 8}] * 3 + [{"pools": 6}]
    assert rig.pooled["pools"].data[:, 0].tolist() == list(range(30))
    rig.assert_clean()


@pytest.mark.parametrize("kind, num_cached", [("last", 12), ("mean", 0), ("token", 0), ("cls", 0)])
def test_a_known_prefix_is_used_where_the_last_token_alone_is_pooled(make_rig, kind, num_cached):
    rig = make_rig(block_size=4)
    rig.add("first", range(16), max_tokens=1)
    rig.run()
    rig.add("pools", range(16), pooling=PoolingParams(kind=kind))
    rig.run()
    assert rig.ends["pools", 0].num_cached_tokens == num_cached
    rig.add("next", range(16), max_tokens=1)
    rig.run()
    assert rig.ends["next", 0].num_cached_tokens == 12
    rig.assert_clean()


def test_blocks_that_a_pooled_prompt_filled_are_found_by_others(make_rig):
    rig = make_rig(block_size=4)
    rig.add("pools", range(16), pooling=MEAN)
    rig.run()
    rig.add("generates", range(16), max_tokens=1)
    rig.run()
    assert rig.ends["generates", 0].num_cached_tokens == 12


def test_a_pooled_prompt_that_lost_its_blocks_starts_over(make_rig_in_turn):
    rig = make_rig_in_turn(num_blocks=9, block_size=4, max_num_batched_tokens=3, enable_prefix_caching=False)
    rig.add("urgent", range(3), max_tokens=25)
    rig.step()
    rig.add("pools", range(30), pooling=TOKEN, priority=1)
    rig.run()
    assert rig.core.stats.num_preemptions > 0
    rig.assert_clean()


@pytest.mark.parametrize("kv, oldest", [("keep", 0), ("recompute", 1)])
def test_a_result_tells_the_oldest_kv_beneath_it(make_rig, kv, oldest):
    rig = make_rig(max_num_batched_tokens=8)
    rig.add("pools", range(20), pooling=LAST)
    rig.step()
    rig.update(kv=kv)
    rig.run()
    assert rig.ends["pools", 0].policy_version == 1 and rig.pooled["pools"].kv_min_version == oldest
    rig.assert_clean()


def test_a_pooled_prompt_can_be_aborted_between_its_chunks(make_rig):
    rig = make_rig(max_num_batched_tokens=8)
    rig.add("pools", range(20), pooling=MEAN)
    rig.step()
    (said,) = rig.abort("pools")
    assert said.finish_reason == "abort"
    rig.assert_clean()


def test_a_failed_step_ends_what_it_pooled(make_rig):
    rig = make_rig()
    rig.fail_at_steps.add(0)
    rig.add("pools", range(9), pooling=MEAN)
    rig.run()
    assert rig.ends["pools", 0].finish_reason == "error"
    rig.assert_clean()


def test_hidden_states_that_are_not_finite_are_an_error(make_rig, monkeypatch):
    rig = make_rig()
    monkeypatch.setattr("rollout_engine.core.fake_executor.fake_pooled", lambda *_: np.float32([1, np.nan]))
    rig.add("pools", range(9), pooling=LAST)
    rig.run()
    end = rig.ends["pools", 0]
    assert (end.finish_reason, end.error) == ("error", BAD_STATES)
    rig.assert_clean()


def test_a_pooled_prompt_may_fill_the_whole_length(make_rig):
    rig = make_rig(max_model_len=32, num_blocks=8, block_size=4)
    rig.add("fits", range(32), pooling=MEAN)
    rig.run()
    with pytest.raises(RequestError, match="33 tokens' is not allowed: must be shorter, to stay within max_model_len"):
        rig.add("too long", range(33), pooling=MEAN)
    rig = make_rig(max_model_len=64, num_blocks=8, block_size=4)
    with pytest.raises(RequestError, match="the KV pool's 32 tokens"):
        rig.add("too long", range(33), pooling=MEAN)


@pytest.mark.parametrize("changes", [dict(max_tokens=1), dict(params=SamplingParams(n=2)), dict(output_token_ids=[3])])
def test_a_pooling_request_that_would_sample_is_refused(make_rig, changes):
    fields = dict(params=SamplingParams(), max_tokens=0, pooling=MEAN, prompt_token_ids=[1]) | changes
    with pytest.raises(RequestError):
        make_rig().core.add_request(EngineCoreRequest(**fields, seed=0, first_sequence_id=0))


def test_kinds_that_the_model_lacks_are_refused_and_so_is_generating_without_a_head(make_rig):
    with pytest.raises(RequestError, match=r"kind='reward' .* It has no classification head \(no score.weight\)"):
        make_rig().add("a", pooling=PoolingParams(kind="reward"))
    with pytest.raises(RequestError, match="this engine's device does not pool"):
        make_rig(pooling=None).add("a", pooling=LAST)
    with pytest.raises(RequestError, match="This model cannot generate"):
        make_rig(generates=False).add("a")
