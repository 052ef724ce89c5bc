"""Order, budget, chunks, preemption, forks: seen in the `SchedulerOutput`s that reach the executor."""

import msgspec
import pytest

from rollout_engine.core import config


def rows(rig):
    """Per step: sequence -> number of tokens."""
    return [{rig.label(row.sequence_id): row.num_scheduled_tokens for row in work.scheduled} for work in rig.works]


def test_a_long_prompt_is_computed_in_chunks_beside_running_sequences(make_rig_in_turn):
    rig = make_rig_in_turn(max_num_batched_tokens=8)
    rig.add("a", [50] * 4)
    rig.step()
    rig.add("b", range(20))
    rig.run()
    assert rows(rig)[:5] == [{"a": 4}, {"a": 1, "b": 7}, {"a": 1, "b": 7}, {"a": 1, "b": 6}, {"a": 1, "b": 1}]
    rig.assert_clean()


def test_prompts_are_computed_in_smaller_chunks_while_others_decode(make_rig_in_turn):
    rig = make_rig_in_turn(max_prefill_beside_decode=6)
    rig.add("a", range(20), max_tokens=6)
    rig.step()
    rig.add("b", range(30, 40), max_tokens=1)
    rig.add("c", range(50, 54), max_tokens=1)
    rig.run()
    assert rows(rig) == [{"a": 20}, {"a": 1, "b": 6}, {"a": 1, "b": 4, "c": 2}, {"a": 1, "c": 2}, {"a": 1}, {"a": 1}]
    rig.assert_clean()


def test_samples_of_a_computed_prompt_join_a_step_without_room_for_more_prompts(make_rig_in_turn):
    rig = make_rig_in_turn(max_prefill_beside_decode=4)
    rig.add("a", range(8), n=3, max_tokens=4)
    rig.step()
    rig.add("urgent", range(50, 64), priority=-1, max_tokens=1)
    rig.add("later", range(30, 34), max_tokens=1)
    rig.run()
    assert rows(rig)[1] == {"0_a": 1, "urgent": 4, "1_a": 1, "2_a": 1}
    rig.assert_clean()


def test_waiting_requests_run_by_priority_then_arrival(make_rig):
    rig = make_rig(max_num_seqs=1)
    for name, priority in (("low", 1), ("first", 0), ("second", 0), ("high", -1)):
        rig.add(name, priority=priority, max_tokens=1)
    rig.run()
    assert [next(iter(step)) for step in rows(rig)] == ["high", "first", "second", "low"]
    rig.assert_clean()


def test_a_waiting_request_of_higher_priority_does_not_displace_a_running_one(make_rig_in_turn):
    rig = make_rig_in_turn(max_num_seqs=1)
    rig.add("runs")
    rig.step()
    rig.add("urgent", priority=-1)
    rig.run()
    assert [next(iter(step)) for step in rows(rig)] == ["runs"] * 8 + ["urgent"] * 8
    rig.assert_clean()


def test_preemption_takes_the_last_by_priority_and_arrival_and_keeps_its_tokens(make_rig):
    rig = make_rig(num_blocks=9, block_size=4, enable_prefix_caching=False)
    rig.add("unimportant", range(7), priority=1, max_tokens=10, seed=1)
    rig.add("older", range(7), max_tokens=10, seed=2)
    rig.add("younger", range(7), max_tokens=10, seed=3)
    rig.run()
    lost = [sequence_id for work in rig.works for sequence_id in work.finished_sequence_ids]
    assert rig.label(lost[0]) == "unimportant"
    assert rig.core.stats.num_preemptions > 0
    back = next(new for work in rig.works[1:] for new in work.new)
    assert rig.label(back.sequence_id) == "unimportant" and back.num_prompt_tokens == 7
    assert back.token_ids[7:-1] == rig.tokens["unimportant", 0][: len(back.token_ids) - 8]
    rig.assert_clean()


def test_the_first_running_sequence_is_never_preempted(make_rig):
    rig = make_rig(num_blocks=5, block_size=4, max_num_seqs=4)
    for i in range(4):
        rig.add(f"r{i}", [i] * 4, max_tokens=12)
    rig.run()
    assert "r0" not in [rig.label(sequence_id) for work in rig.works[:12] for sequence_id in work.finished_sequence_ids]
    assert rig.core.stats.num_preemptions > 0
    rig.assert_clean()


def test_a_request_that_does_not_fit_waits_without_displacing_anyone(make_rig):
    rig = make_rig(num_blocks=6, block_size=4)
    rig.add("small", [50] * 8, max_tokens=4)
    rig.step()
    rig.add("big", range(20), max_tokens=2)
    rig.run()
    assert rig.core.stats.num_preemptions == 0
    rig.assert_clean()


def test_n_samples_compute_the_prompt_once_and_draw_from_its_one_row(make_rig):
    rig = make_rig(num_blocks=200, max_num_seqs=16)
    rig.add("a", range(30), n=16, max_tokens=5)
    rig.step()
    assert rig.core.stats.num_prompt_tokens_computed == 30
    assert [(task.sequence_id, task.row) for task in rig.works[0].samples] == [(i, 0) for i in range(16)]
    assert {tuple(new.token_ids[:30]) for new in rig.works[0].new} == {tuple(range(30))}
    assert len({tokens[0] for (_, _), tokens in rig.tokens.items()}) > 1
    rig.run()
    assert rig.executor.num_tokens_computed == 30 + 16 * 4
    rig.assert_clean()


def test_the_prompt_in_chunks_is_computed_once_too(make_rig):
    rig = make_rig(max_num_batched_tokens=7)
    rig.add("a", range(30), n=3, max_tokens=2)
    rig.run()
    assert [len(work.samples) for work in rig.works][:5] == [0, 0, 0, 0, 3]
    assert rig.executor.num_tokens_computed == 30 + 3
    rig.assert_clean()


def test_a_shared_partial_block_is_copied_by_all_but_its_last_holder(make_rig):
    rig = make_rig(block_size=4)
    rig.add("a", range(10), n=4, max_tokens=2)
    rig.run()
    copies = [copy for work in rig.works for copy in work.block_copies]
    assert len(copies) == 3 and len({source for source, _ in copies}) == 1
    assert len({destination for _, destination in copies}) == 3
    rig.assert_clean()


def test_full_prompt_blocks_are_shared_without_copies(make_rig):
    rig = make_rig(block_size=4, num_blocks=8)
    rig.add("a", range(16), n=4, max_tokens=5)
    rig.run()
    assert (rig.core.stats.num_block_copies, rig.core.stats.num_preemptions) == (0, 0)
    rig.assert_clean()


def test_samples_beyond_the_slots_wait_with_their_first_token(make_rig):
    rig = make_rig(max_num_seqs=2)
    rig.add("a", range(10), n=5, max_tokens=3)
    first = rig.step()
    assert sorted(output.index for output in first) == [0, 1, 2, 3, 4]
    rig.run()
    assert rig.executor.num_tokens_computed == 10 + 5 * 2
    rig.assert_clean()


def test_parked_samples_and_waiting_requests_stand_in_one_order(make_rig):
    rig = make_rig(max_num_seqs=1)
    rig.add("a", n=2, max_tokens=2)
    rig.add("later", max_tokens=1)
    rig.add("urgent", max_tokens=1, priority=-1)
    rig.run()
    assert [next(iter(step)) for step in rows(rig)] == ["urgent", "0_a", "0_a", "1_a", "later"]
    rig.assert_clean()


def test_references_of_parked_samples_are_dropped_before_anything_running_is_preempted(make_rig_in_turn):
    rig = make_rig_in_turn(num_blocks=7, block_size=4, max_num_seqs=2)
    rig.add("a", range(6), n=4, max_tokens=9)
    while not rig.core.stats.num_references_dropped:
        rig.step()
    assert rig.works[-1].finished_sequence_ids == [3, 2]
    assert set(rows(rig)[-1]) == {"0_a", "1_a"} and rig.core.stats.num_preemptions == 0
    rig.run()
    rig.assert_clean()


@pytest.mark.quick(8)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("num_blocks", "max_num_seqs", "n"), [(4, 1, 8), (4, 8, 40), (5, 3, 16), (6, 2, 3)])
def test_more_samples_than_slots_and_blocks_still_all_finish(make_rig, num_blocks, max_num_seqs, n, caching):
    rig = make_rig(num_blocks=num_blocks, block_size=4, max_num_seqs=max_num_seqs, enable_prefix_caching=caching)
    rig.add("a", range(9), n=n, max_tokens=7)
    rig.add("b", range(3, 12), n=2, max_tokens=7, priority=-1)
    rig.run()
    rig.assert_clean()


def test_a_waiting_request_of_higher_priority_takes_blocks_from_parked_samples_when_nothing_runs(make_rig_in_turn):
    rig = make_rig_in_turn(num_blocks=4, block_size=4, max_num_seqs=1)
    rig.add("a", range(9), n=3, max_tokens=3)
    rig.step()
    rig.add("urgent", [30] * 14, max_tokens=3, priority=-1)
    rig.abort("0_a")
    rig.step()
    assert rows(rig)[-1] == {"urgent": 14}
    assert rig.core.stats.num_references_dropped == 2
    rig.run()
    rig.assert_clean()


def test_two_prompts_that_fill_half_the_pool_each_do_not_starve_one_another(make_rig):
    rig = make_rig(num_blocks=8, block_size=4, max_num_batched_tokens=4)
    rig.add("a", [1] * 28, max_tokens=4)
    rig.add("b", [2] * 28, max_tokens=4)
    rig.run(max_steps=40)
    assert rig.core.stats.num_preemptions == 0
    rig.assert_clean()


def test_every_step_with_work_computes_something_in_the_smallest_pool(make_rig):
    rig = make_rig(num_blocks=1, block_size=4, max_num_seqs=4, max_num_batched_tokens=1)
    for i in range(3):
        rig.add(f"r{i}", [i, i], max_tokens=3, n=2)
    while rig.core.has_unfinished_requests():
        rig.step()
        assert rig.works[-1].num_scheduled_tokens >= 1
    rig.assert_clean()


def test_a_preempted_sequence_returns_on_the_blocks_that_are_still_cached(make_rig):
    rig = make_rig(num_blocks=9, block_size=4)
    rig.add("older", [1] * 8, max_tokens=20)
    rig.add("younger", [2] * 8, max_tokens=12)
    rig.run()
    assert rig.core.stats.num_preemptions > 0 and rig.core.stats.num_cached_tokens >= 8
    assert rig.ends["younger", 0].num_cached_tokens == 0
    rig.assert_clean()


def test_prompts_to_score_share_a_limit_that_others_do_not_wait_for(make_rig_in_turn, monkeypatch):
    monkeypatch.setattr(config, "_MAX_PROMPT_LOGITS", 6 * 97 + 96)
    rig = make_rig_in_turn(max_num_batched_tokens=32)
    rig.add("plain", [50] * 4)
    rig.add("a", range(10), prompt_logprobs=0, max_tokens=2)
    rig.step()
    rig.add("b", range(20, 32), prompt_logprobs=1, max_tokens=2)
    rig.run()
    assert rows(rig)[:5] == [
        {"plain": 4, "a": 6},
        {"plain": 1, "a": 4, "b": 2},
        {"plain": 1, "a": 1, "b": 6},
        {"plain": 1, "b": 4},
        {"plain": 1, "b": 1},
    ]
    rig.assert_clean()


def test_a_known_prefix_is_computed_again_where_its_log_probs_are_asked_for(make_rig):
    rig = make_rig(block_size=4)
    for name, asked in (("first", None), ("asks", 0), ("does not", None)):
        rig.add(name, range(16), max_tokens=1, prompt_logprobs=asked)
        rig.run()
    assert [rig.ends[name, 0].num_cached_tokens for name in ("first", "asks", "does not")] == [0, 0, 12]
    for name, states in (("all states", "all"), ("sampled states", "sampled")):
        rig.add(name, range(16), max_tokens=1, return_hidden_states=states)
        rig.run()
    assert [rig.ends[name, 0].num_cached_tokens for name in ("all states", "sampled states")] == [0, 12]
    rig.assert_clean()


def test_tokens_that_a_lost_engine_had_computed_are_counted_as_computed_again(make_rig):
    whole, moved = make_rig(), make_rig()
    whole.add("a", [5, 6, 7, 8, 9], max_tokens=8)
    whole.run()
    request, known = whole.requests["a"], whole.tokens["a", 0][:3]
    moved.core.add_request(msgspec.structs.replace(request, output_token_ids=known))
    moved.keys[0], moved.requests["a"], moved.tokens["a", 0] = ("a", 0), request, known.copy()
    moved.run()
    assert whole.core.stats.num_recomputed_tokens == 0
    assert moved.core.stats.num_recomputed_tokens == 5 + 3 - 1  # the last token's KV was never computed
