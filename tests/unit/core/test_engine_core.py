import logging
from concurrent.futures import Future

import numpy as np
import pytest

from rollout_engine.base.messages import ModelRunnerOutput
from rollout_engine.base.seeds import child_seed
from rollout_engine.core.engine_core import EngineCore


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
    rig.executor.scripts = {0: [50, 51, 41, 52, 53, 54]}
    rig.add("a", **(dict(max_tokens=6) | fields))
    rig.run()
    end = rig.ends["a", 0]
    assert (len(rig.tokens["a", 0]), end.finish_reason, end.stop_reason) == (num_tokens, reason, stop_reason)


def test_one_bad_row_ends_one_sequence_and_no_other(make_rig):
    rig = make_rig()
    rig.errors[1] = "NaN logits"
    rig.add("a", n=3)
    rig.add("b")
    rig.run()
    assert [rig.ends["a", i].finish_reason for i in range(3)] == ["length", "error", "length"]
    assert rig.ends["a", 1].error == "NaN logits" and rig.ends["a", 1].new_token_ids == []
    rig.assert_clean()


def test_kv_of_a_sequence_that_went_wrong_is_not_given_to_others(make_rig):
    rig = make_rig()
    rig.errors[0] = "NaN logits"
    rig.add("a", range(20))
    rig.run()
    rig.add("b", range(20))
    rig.run()
    assert rig.ends["b", 0].num_cached_tokens == 0
    rig.assert_clean()


# Log-prob columns


def test_the_runners_columns_arrive_whole_and_in_order(make_rig):
    rig = make_rig()
    rig.add("none", range(3), max_tokens=1)
    rig.add("cut", range(3), max_tokens=1, logprobs=4, top_p=0.5, n=2)
    rig.add("top", range(3), max_tokens=1, logprobs=2)
    outputs = rig.core.step()
    assert outputs.sequence_ids == [0, 1, 2, 3]
    assert outputs.logprobs == [-1.0 - token_id / 97 for token_id in outputs.token_ids]
    assert outputs.kept_logprob_mass == [0.0, -0.125, -0.125, 0.0]
    ids, values = outputs.top_logprobs
    assert (ids.shape, ids.dtype, values.shape, values.dtype) == ((4, 4), np.int32, (4, 4), np.float32)
    assert ids[:, 0].tolist() == outputs.token_ids


def test_columns_nobody_asked_for_are_absent(make_rig):
    rig = make_rig()
    rig.add("none", max_tokens=1)
    outputs = rig.core.step()
    assert (outputs.logprobs, outputs.kept_logprob_mass, outputs.top_logprobs) == (None, None, None)


def test_a_row_that_failed_is_left_out_of_every_column(make_rig):
    rig = make_rig()
    rig.errors[1] = "NaN logits"
    rig.add("a", n=3, max_tokens=1, logprobs=2, top_p=0.5)
    outputs = rig.core.step()
    assert outputs.sequence_ids == [0, 2] and -1 not in outputs.token_ids
    assert [len(column) for column in (outputs.kv_min_versions, outputs.logprobs, outputs.kept_logprob_mass)] == [2] * 3
    assert outputs.top_logprobs[0][:, 0].tolist() == outputs.token_ids
    ends = [(end.sequence_id, end.finish_reason) for end in outputs.ended]
    assert ends == [(1, "error"), (0, "length"), (2, "length")]


# Abort


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_abort_ends_every_live_sample_once_and_frees_everything(make_rig, num_steps):
    rig = make_rig(max_num_seqs=2, max_num_batched_tokens=12)
    rig.add("a", n=4)
    rig.add("b")
    for _ in range(num_steps):
        rig.step()
    assert sorted(said.index for said in rig.abort("a", "unknown", "a")) == [0, 1, 2, 3]
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


def test_numbers_that_name_no_live_sequence_abort_nothing(make_rig):
    rig = make_rig()
    rig.add("a", n=2)
    ended = [end.sequence_id for end in rig.core.abort_sequences([2, -1, 1, 1 << 70, 1]).ended]
    assert ended == [1] and rig.core.unfinished_sequences == [0]
    assert rig.core.abort_sequences([0]).ended and rig.core.unfinished_sequences == []


# Failing steps


def test_a_failed_step_ends_what_it_scheduled_and_nothing_else(make_rig, caplog):
    rig = make_rig(max_num_seqs=2)
    rig.add("a", n=3, max_tokens=4)
    rig.add("b", range(20, 30))
    rig.fail_at_steps.add(1)
    with caplog.at_level(logging.WARNING):
        rig.run()
    assert [rig.ends["a", i].finish_reason for i in range(3)] == ["error", "length", "length"]
    assert "step 1 failed: RuntimeError: told to fail" in rig.ends["b", 0].error
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "sequence 0: tokens [10, 11), 3 blocks" in record.getMessage()
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
    rig.submit = lambda work: raising(OSError("device lost"))
    rig.step()
    del rig.submit
    rig.assert_clean()


def raising(error):
    """A result that never comes."""
    outcome = Future()
    outcome.set_exception(error)
    return outcome.result


def test_an_executor_that_returns_too_few_tokens_fails_the_step(make_rig):
    rig = make_rig()
    rig.submit = lambda work: lambda: ModelRunnerOutput([], None)
    rig.add("a")
    rig.step()
    assert "returned 0 token_ids for 1 samples" in rig.ends["a", 0].error


def test_after_an_interrupt_the_next_step_delivers_the_ends_of_the_broken_one(make_rig):
    rig = make_rig(max_num_seqs=1)
    rig.add("a")
    rig.add("b")
    rig.submit = lambda work: raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        rig.step()
    del rig.submit
    assert rig.core.has_unfinished_requests()
    rig.run()
    assert (rig.ends["a", 0].finish_reason, rig.ends["b", 0].finish_reason) == ("error", "length")
    rig.assert_clean()


# Counting


def test_usage_counts_blocks_of_live_requests_only(make_rig_in_turn):
    rig = make_rig_in_turn(num_blocks=10, block_size=4)
    rig.add("a", range(8), max_tokens=4)
    rig.step()
    assert rig.core.cache_usage() == pytest.approx(0.2)
    rig.run()
    assert rig.core.cache_usage() == 0.0


def test_an_idle_step_makes_the_runner_forget_and_then_does_nothing(make_rig):
    rig = make_rig()
    rig.add("a", max_tokens=1)
    rig.run()
    assert rig.step() == [] and rig.executor.sequences == {}
    num_calls = len(rig.works)
    assert rig.step() == [] and len(rig.works) == num_calls


def test_the_core_takes_any_executor(make_rig):
    rig = make_rig()
    core = EngineCore(rig.executor, rig.config, policy_version=9)
    assert core.policy_version == 9 and not core.has_unfinished_requests()
