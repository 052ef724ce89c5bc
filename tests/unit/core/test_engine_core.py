import logging

import numpy as np
import pytest

from rollout_engine.core import prefix_cache
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.errors import WeightUpdateError
from rollout_engine.messages import ModelRunnerOutput
from rollout_engine.seeds import child_seed


def test_a_request_gets_the_tokens_of_its_own_context_and_seed(make_rig):
    rig = make_rig()
    rig.add("a", max_tokens=20)
    rig.add("b", range(5, 9), max_tokens=3, n=3)
    rig.run()
    assert {end.finish_reason for end in rig.ends.values()} == {"length"}
    rig.assert_clean()


def test_n_samples_differ_and_each_replays_alone_from_its_seed(make_rig):
    rig = make_rig()
    rig.add("group", n=3, seed=99)
    for index in range(3):
        rig.add(f"alone{index}", seed=child_seed(99, index))
    rig.run()
    for index in range(3):
        assert rig.tokens["group", index] == rig.tokens[f"alone{index}", 0]
    assert rig.tokens["group", 0] != rig.tokens["group", 1]


# How sequences end


@pytest.mark.parametrize(
    ("fields", "num_tokens", "reason", "stop_reason"),
    [
        (dict(eos=[41]), 3, "stop", None),
        (dict(stop_token_ids=[41]), 3, "stop", 41),
        (dict(eos=[41], stop_token_ids=[41]), 3, "stop", None),
        (dict(eos=[41], min_tokens=3), 3, "stop", None),
        (dict(eos=[41], min_tokens=4), 6, "length", None),
        (dict(), 6, "length", None),
        (dict(eos=[41], max_tokens=3), 3, "stop", None),
    ],
)
def test_end_tokens_are_kept_and_named_once_min_tokens_exist(make_rig, fields, num_tokens, reason, stop_reason):
    rig = make_rig()
    rig.executor.scripts = {"a": [50, 51, 41, 52, 53, 54]}
    rig.add("a", **(dict(max_tokens=6) | fields))
    rig.run()
    end = rig.ends["a", 0]
    assert (len(rig.tokens["a", 0]), end.finish_reason, end.stop_reason) == (num_tokens, reason, stop_reason)


def test_one_bad_row_ends_one_sequence_and_no_other(make_rig):
    rig = make_rig()
    rig.errors["1_a"] = "NaN logits"
    rig.add("a", n=3)
    rig.add("b")
    rig.run()
    assert [rig.ends["a", i].finish_reason for i in range(3)] == ["length", "error", "length"]
    assert rig.ends["a", 1].error == "NaN logits" and rig.ends["a", 1].new_token_ids == []
    rig.assert_clean()


def test_kv_of_a_sequence_that_went_wrong_is_not_given_to_others(make_rig):
    rig = make_rig()
    rig.errors["a"] = "NaN logits"
    rig.add("a", range(20))
    rig.run()
    rig.add("b", range(20))
    rig.run()
    assert rig.ends["b", 0].num_cached_tokens == 0
    rig.assert_clean()


# Log-prob columns


def test_each_request_gets_the_columns_it_asked_for(make_rig):
    rig = make_rig()
    rig.add("none", max_tokens=1)
    rig.add("sampled", max_tokens=1, logprobs=0)
    rig.add("top", max_tokens=1, logprobs=2)
    rig.add("cut", max_tokens=1, logprobs=4, top_p=0.5)
    rig.add("cut, none", max_tokens=1, top_p=0.5)
    rig.step()
    ends = {name: end for (name, _), end in rig.ends.items()}
    for name in ("none", "cut, none"):
        end = ends[name]
        assert (end.new_logprobs, end.new_top_logprobs, end.new_kept_logprob_mass) == (None, None, None)
    token = ends["sampled"].new_token_ids[0]
    assert ends["sampled"].new_logprobs == [-1.0 - token / 97] and ends["sampled"].new_top_logprobs is None
    ids, values = ends["top"].new_top_logprobs
    assert (ids.shape, ids.dtype, values.shape, values.dtype) == ((1, 2), np.int32, (1, 2), np.float32)
    assert ids[0, 0] == ends["top"].new_token_ids[0] and ends["top"].new_kept_logprob_mass is None
    assert ends["cut"].new_top_logprobs[0].shape == (1, 4) and ends["cut"].new_kept_logprob_mass == [-0.125]


# Abort


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_abort_ends_every_live_sample_once_and_frees_everything(make_rig, num_steps):
    rig = make_rig(max_num_seqs=2, max_num_batched_tokens=12)
    rig.add("a", n=4)
    rig.add("b")
    for _ in range(num_steps):
        rig.step()
    assert [output.index for output in rig.abort("a", "unknown", "a")] == [0, 1, 2, 3]
    rig.run()
    rig.assert_clean()


def test_aborting_one_sample_leaves_the_others(make_rig):
    rig = make_rig()
    rig.add("a", n=3)
    rig.step()
    assert [output.index for output in rig.abort("1_a")] == [1]
    assert rig.abort("1_a") == []
    rig.run()
    assert [rig.ends["a", i].finish_reason for i in range(3)] == ["length", "abort", "length"]
    rig.assert_clean()


@pytest.mark.parametrize("num_steps", [0, 1])
def test_aborting_the_sample_that_computes_the_prompt_hands_the_lead_on(make_rig, num_steps):
    rig = make_rig(max_num_batched_tokens=8)
    rig.add("a", range(20), n=3)
    for _ in range(num_steps):
        rig.step()
    rig.abort("0_a")
    rig.run()
    assert (rig.tokens["a", 0], rig.ends["a", 2].finish_reason) == ([], "length")
    rig.assert_clean()


def test_aborting_all_samples_one_by_one_ends_the_request(make_rig):
    rig = make_rig()
    rig.add("a", n=3)
    rig.abort("0_a", "2_a", "1_a")
    rig.assert_clean()


def test_an_id_that_names_a_request_and_a_sample_means_the_request(make_rig):
    rig = make_rig()
    rig.add("a", n=2)
    rig.add("0_a", n=2)
    assert {output.request_id for output in rig.abort("0_a")} == {"0_a"}
    rig.run()
    assert {rig.ends["a", i].finish_reason for i in range(2)} == {"length"}
    rig.assert_clean()


# Failing steps


def test_a_failed_step_ends_what_it_scheduled_and_nothing_else(make_rig, caplog):
    rig = make_rig(max_num_seqs=2)
    rig.add("a", n=3, max_tokens=4)
    rig.add("b")
    rig.fail_at_steps.add(1)
    with caplog.at_level(logging.WARNING):
        rig.run()
    assert [rig.ends["a", i].finish_reason for i in range(3)] == ["error", "length", "length"]
    assert "step 1 failed: RuntimeError: told to fail" in rig.ends["b", 0].error
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "0_a: tokens [10, 11), 3 blocks" in record.getMessage()
    assert (rig.core.stats.num_failed_steps, rig.core.cache_usage()) == (1, 0.0)
    rig.assert_clean()


def test_a_step_that_fails_in_the_prompt_ends_all_its_samples(make_rig):
    rig = make_rig(max_num_batched_tokens=8)
    rig.add("a", range(20), n=3)
    rig.add("b", max_tokens=2)
    rig.fail_at_steps.add(1)
    rig.run()
    assert [rig.ends["a", i].finish_reason for i in range(3)] == ["error"] * 3
    assert rig.ends["b", 0].finish_reason == "length"
    rig.assert_clean()


def test_what_a_failed_step_should_have_forgotten_is_named_again(make_rig):
    rig = make_rig(max_num_seqs=1)
    rig.add("a", max_tokens=1)
    rig.add("b")
    rig.step()
    fake, rig.executor = rig.executor, Broken()
    rig.step()
    rig.executor = fake
    rig.assert_clean()


class Broken:
    def execute(self, work):
        raise OSError("device lost")


class Short:
    def execute(self, work):
        return ModelRunnerOutput([], None)


def test_an_executor_that_returns_too_few_tokens_fails_the_step(make_rig):
    rig = make_rig()
    rig.executor = Short()
    rig.add("a")
    rig.step()
    assert "returned 0 token_ids for 1 samples" in rig.ends["a", 0].error


class Interrupted:
    def execute(self, work):
        raise KeyboardInterrupt


def test_after_an_interrupt_the_next_step_delivers_the_ends_of_the_broken_one(make_rig):
    rig = make_rig(max_num_seqs=1)
    rig.add("a")
    rig.add("b")
    fake, rig.executor = rig.executor, Interrupted()
    with pytest.raises(KeyboardInterrupt):
        rig.step()
    rig.executor = fake
    assert rig.core.has_unfinished_requests()
    rig.run()
    assert (rig.ends["a", 0].finish_reason, rig.ends["b", 0].finish_reason) == ("error", "length")
    rig.assert_clean()


# Prefix cache


def test_a_known_prefix_is_not_computed_again_but_for_its_last_token(make_rig):
    rig = make_rig(block_size=4)
    rig.add("a", range(16), max_tokens=1)
    rig.run()
    rig.add("same", range(16), max_tokens=1)
    rig.add("longer", range(18), max_tokens=1)
    rig.run()
    cached = {name: end.num_cached_tokens for (name, _), end in rig.ends.items()}
    assert cached == {"a": 0, "same": 12, "longer": 16}
    assert rig.executor.num_tokens_computed == 16 + 4 + 2
    rig.assert_clean()


def test_sampled_tokens_are_cached_for_the_next_turn(make_rig):
    rig = make_rig(block_size=4)
    rig.add("turn 1", range(8), max_tokens=9)
    rig.run()
    rig.add("turn 2", [*range(8), *rig.tokens["turn 1", 0], 1, 2])
    rig.run()
    assert rig.ends["turn 2", 0].num_cached_tokens == 16
    rig.assert_clean()


def test_prompts_of_different_salts_share_nothing(make_rig):
    rig = make_rig()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        rig.add(name, range(20), salt=salt)
        rig.run()
    assert [rig.ends[name, 0].num_cached_tokens for name in "abc"] == [0, 0, 16]
    rig.assert_clean()


def test_nothing_is_cached_when_caching_is_off(make_rig):
    rig = make_rig(enable_prefix_caching=False)
    for name in "ab":
        rig.add(name, range(20))
        rig.run()
    assert rig.core.stats.num_cached_tokens == 0
    rig.assert_clean()


def test_colliding_hashes_do_no_harm(make_rig, monkeypatch):
    monkeypatch.setattr(prefix_cache, "block_hash", lambda *fields: b"same")
    rig = make_rig(num_blocks=12, block_size=2)
    for i in range(12):
        rig.add(f"r{i}", [i % 3, 1, 2, 3, 4, i % 2], n=2)
    rig.run()
    rig.assert_clean()


def test_under_pressure_the_tail_of_a_cached_prefix_goes_before_its_head(make_rig):
    rig = make_rig(num_blocks=6, block_size=4)
    rig.add("a", range(16), max_tokens=1)
    rig.run()
    rig.add("b", [50] * 16, max_tokens=1)
    rig.run()
    rig.add("a again", range(16), max_tokens=1)
    rig.run()
    assert rig.ends["a again", 0].num_cached_tokens == 8
    rig.assert_clean()


# Policy versions


def test_cached_blocks_never_cross_versions(make_rig):
    rig = make_rig()
    rig.add("a", range(20))
    rig.run()
    assert rig.commit(1) == 0
    rig.add("b", range(20))
    rig.run()
    assert rig.ends["b", 0].num_cached_tokens == 0
    rig.add("c", range(20))
    rig.run()
    assert rig.ends["c", 0].num_cached_tokens == 16
    rig.assert_clean()


def test_keep_goes_on_over_old_kv_and_says_so(make_rig):
    rig = make_rig()
    rig.add("a", max_tokens=4)
    spans = [rig.step()[0] for _ in range(2)]
    assert rig.commit(5) == 1
    spans += [rig.step()[0] for _ in range(2)]
    assert [(s.policy_version, s.kv_min_version) for s in spans] == [(0, 0), (0, 0), (5, 0), (5, 0)]
    rig.assert_clean()


def test_recompute_makes_the_next_token_exact_under_the_new_policy(make_rig):
    rig = make_rig()
    rig.add("a", n=2, max_tokens=4)
    rig.step()
    assert rig.commit(5, "recompute") == 1
    assert rig.core.cache_usage() == 0.0
    outputs = rig.step()
    assert [(o.policy_version, o.kv_min_version) for o in outputs] == [(5, 5), (5, 5)]
    rig.run()
    rig.assert_clean()


@pytest.mark.parametrize("num_tokens_before", [3, 4, 6])
def test_blocks_filled_under_two_versions_or_on_top_of_older_kv_are_not_published(make_rig, num_tokens_before):
    rig = make_rig(block_size=4, max_num_batched_tokens=num_tokens_before)
    rig.add("mixed", range(15), max_tokens=8)
    rig.step()
    rig.commit(1)
    rig.run()
    rig.add("b", range(15))
    rig.run()
    assert rig.ends["b", 0].num_cached_tokens == 0
    rig.assert_clean()


def test_a_request_still_waiting_at_a_commit_looks_up_under_the_new_version(make_rig):
    rig = make_rig(max_num_seqs=1)
    rig.add("a", range(20), max_tokens=2)
    rig.step()
    rig.add("b", range(20), max_tokens=2)
    rig.commit(1)
    rig.run()
    assert (rig.ends["b", 0].num_cached_tokens, rig.ends["b", 0].kv_min_version) == (0, 1)
    rig.assert_clean()


@pytest.mark.parametrize("version", [3, 2])
def test_a_version_that_does_not_grow_forgets_all_old_kv(make_rig, version):
    rig = make_rig(policy_version=3)
    rig.add("a", range(20), max_tokens=2)
    rig.run()
    rig.add("b", range(20, 40))
    rig.step()
    rig.commit(version, "keep")
    assert rig.core.cache_usage() == 0.0
    rig.commit(3)
    rig.add("c", range(20))
    rig.run()
    assert rig.ends["c", 0].num_cached_tokens == 0
    rig.assert_clean()


def test_an_unknown_kv_mode_is_refused_and_changes_nothing(make_rig):
    rig = make_rig()
    with pytest.raises(WeightUpdateError, match="kv='drop'.*'keep' or 'recompute'"):
        rig.core.commit_version(1, "drop")
    assert rig.core.policy_version == 0


# Counting


def test_usage_counts_blocks_of_live_requests_only(make_rig):
    rig = make_rig(num_blocks=10, block_size=4)
    rig.add("a", range(8), max_tokens=4)
    rig.step()
    assert rig.core.cache_usage() == pytest.approx(0.2)
    rig.run()
    assert rig.core.cache_usage() == 0.0


def test_an_idle_step_makes_the_runner_forget_and_then_does_nothing(make_rig):
    rig = make_rig()
    rig.add("a", max_tokens=1)
    rig.run()
    assert rig.core.step() == [] and rig.executor.sequences == {}
    num_calls = len(rig.works)
    assert rig.core.step() == [] and len(rig.works) == num_calls


def test_the_core_takes_any_executor(make_rig):
    rig = make_rig()
    core = EngineCore(rig.executor, rig.config, policy_version=9)
    assert core.policy_version == 9 and not core.has_unfinished_requests()
