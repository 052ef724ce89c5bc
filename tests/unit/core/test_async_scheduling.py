"""The next step is submitted before the result of the last one is in; outputs stay the same."""

from functools import partial

import pytest

from rollout_engine.core import config


@pytest.fixture(params=[False, True], ids=["ahead", "ahead at once"])
def rig(request, make_rig_in_turn):
    return make_rig_in_turn(async_scheduling=True, eager=request.param)


def computed(rig, name):
    """Tokens computed for a sequence, step by step."""
    rows = (row for work in rig.works for row in work.scheduled)
    return [row.num_scheduled_tokens for row in rows if rig.label(row.sequence_id) == name]


def test_the_next_step_is_submitted_before_the_last_one_is_waited_for(make_rig_in_turn):
    rig = make_rig_in_turn(async_scheduling=True)
    log = []

    def submit(work):
        log.append(f"submit {work.step}")
        run = partial(rig.execute, work)
        return lambda: [log.append(f"wait {work.step}"), run()][1]

    rig.submit = submit
    rig.add("a", max_tokens=4)
    rig.run()
    assert log == [
        *("submit 0", "submit 1", "wait 0"),
        *("submit 2", "wait 1"),
        *("submit 3", "wait 2"),
        "wait 3",
    ]
    rig.assert_clean()


def test_in_turn_nothing_is_in_flight_between_two_steps(make_rig_in_turn):
    rig = make_rig_in_turn()
    rig.add("a", n=3, eos=[3, 5, 7])
    while rig.core.has_unfinished_requests():
        rig.step()
        assert not rig.core._steps
    assert rig.core.stats.num_surplus_tokens == 0


def test_an_end_found_late_costs_one_token_that_is_not_returned(rig):
    rig.executor.scripts = {0: [50, 51, 41]}
    rig.add("a", eos=[41], max_tokens=20)
    rig.run()
    rig.step()
    assert (rig.tokens["a", 0], rig.ends["a", 0].finish_reason) == ([50, 51, 41], "stop")
    stats = rig.core.stats
    assert (stats.num_tokens_sampled, stats.num_tokens_computed, stats.num_surplus_tokens) == (3, 13, 1)
    assert rig.core.cache_usage() == 0


def test_an_end_by_length_is_foreseen(rig):
    rig.add("a", max_tokens=5, n=2)
    rig.add("b", range(20, 30), max_tokens=1)
    rig.run()
    assert rig.core.stats.num_surplus_tokens == 0
    assert rig.executor.num_tokens_computed == 2 * 10 + 2 * 4
    rig.assert_clean()


def test_a_sequence_that_cannot_be_sampled_ends_alone(rig):
    rig.errors[0] = "NaN logits"
    rig.add("a")
    rig.add("b")
    rig.run()
    assert (rig.ends["a", 0].error, rig.ends["b", 0].finish_reason) == ("NaN logits", "length")
    assert rig.core.stats.num_failed_steps == 0
    rig.assert_clean()


def test_a_token_in_flight_is_not_returned_after_an_abort_nor_for_the_next_request_of_that_name(rig):
    rig.add("a")
    rig.step()
    assert rig.core._steps
    rig.abort("a")
    rig.add("a", range(20, 26), seed=8, max_tokens=3)
    rig.run()
    assert rig.tokens["a", 0] == rig.truth(("a", 0))[0]
    rig.assert_clean()


def test_a_step_waits_for_the_last_one_where_a_sequence_would_lose_its_blocks(make_rig_in_turn):
    """9 blocks of 4 for three sequences of up to 18 tokens: all but the step that preempts are submitted ahead."""
    rig = make_rig_in_turn(async_scheduling=True, num_blocks=9, enable_prefix_caching=False)
    in_flight = []
    submit = rig.submit
    rig.submit = lambda work: (
        in_flight.append((len(rig.core._steps) - 1, rig.core.stats.num_preemptions)) or submit(work)
    )
    for name in "abc":
        rig.add(name, max_tokens=8)
    rig.run()
    first_after = [next(ahead for ahead, num in in_flight if num == wanted) for wanted in (1, 2)]
    assert rig.core.stats.num_preemptions >= 2 and first_after == [0, 0]
    assert sum(ahead for ahead, _ in in_flight) > len(in_flight) // 2
    rig.assert_clean()


def test_a_commit_lets_the_step_in_flight_end_under_its_own_version(rig):
    rig.add("a", max_tokens=5)
    spans = rig.step() + rig.step()
    assert rig.commit(5) == 1 and not rig.core._steps
    while rig.core.has_unfinished_requests():
        spans += rig.step()
    assert [(s.policy_version, s.kv_min_version) for s in spans] == [(0, 0)] * 3 + [(5, 0)] * 2
    assert [len(s.new_token_ids) for s in spans] == [1] * 5
    rig.assert_clean()


def test_a_pause_returns_what_was_in_flight_and_leaves_nothing_there(rig):
    rig.add("a")
    rig.step()
    (returned,) = rig.pause("keep")
    assert (returned.new_token_ids, returned.finish_reason) == (rig.truth(("a", 0))[0][1:2], None)
    assert not rig.core._steps and rig.step() == [] and not rig.core.can_progress()
    rig.resume()
    rig.run()
    rig.assert_clean()


def test_tokens_that_landed_are_returned_before_an_abort_ends_their_sequence(rig):
    rig.add("a")
    rig.step()
    rig.commit(3)
    (said,) = rig.abort("a")
    assert (len(rig.tokens["a", 0]), said.finish_reason) == (2, "abort")
    rig.assert_clean()


def test_what_stood_behind_a_failed_step_is_computed_again(make_rig_in_turn):
    """`b` is scheduled for the first time behind the step that fails, and its prompt ends there, for three samples."""
    rig = make_rig_in_turn(async_scheduling=True)
    rig.add("a", max_tokens=9)
    rig.step()
    rig.add("b", range(20, 32), n=3, max_tokens=4, prompt_logprobs=1)
    rig.fail_at_steps.add(1)
    rig.run()
    assert rig.ends["a", 0].finish_reason == "error"
    assert [rig.ends["b", i].finish_reason for i in range(3)] == ["length"] * 3
    assert computed(rig, "0_b") == [12, 1, 1, 1]
    rig.assert_clean()


def test_a_prompt_that_ends_behind_a_failed_part_of_it_fails_with_all_its_samples(make_rig_in_turn):
    rig = make_rig_in_turn(async_scheduling=True, max_num_batched_tokens=8)
    rig.add("a", range(20), n=3)
    rig.fail_at_steps.add(1)
    rig.run()
    assert [rig.ends["a", i].finish_reason for i in range(3)] == ["error"] * 3
    rig.assert_clean()


def test_an_interrupt_leaves_nothing_in_flight_and_every_request_an_end(rig):
    rig.add("a", n=2)
    rig.step()
    rig.core._steps[0]._wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        rig.step()
    assert not rig.core._steps
    rig.core.check_integrity()
    rig.run()
    assert [rig.ends["a", i].finish_reason for i in range(2)] == ["error"] * 2


def interrupt():
    raise KeyboardInterrupt


def test_prompts_are_scored_once_whatever_is_in_flight(make_rig_in_turn, monkeypatch):
    monkeypatch.setattr(config, "_MAX_PROMPT_LOGITS", 5 * 97)
    rig = make_rig_in_turn(async_scheduling=True)
    rig.add("a", range(17), prompt_logprobs=2, n=2)
    rig.add("b", range(3, 12), prompt_logprobs=0)
    rig.run()
    rig.assert_clean()
