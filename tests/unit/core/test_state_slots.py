"""Slots of states: who reads and writes which, which snapshots are kept, and what they let others skip."""

import pytest

from rollout_engine.core.config import CoreConfig
from tests.unit.core.oracle import make_oracle_rig

ROOMY = dict(block_size=4, num_state_slots=64, state_interval=8)
SCARCE = dict(block_size=4, num_state_slots=9, state_interval=8)
"""One slot more than sequences may run: none for snapshots inside a prompt."""


def moves(rig, step):
    """The moves of a step: of each sequence."""
    return {rig.label(row.sequence_id): row.state for row in rig.works[step].scheduled}


def cached(rig, names):
    return [rig.num_cached_tokens[name] for name in names]


# Forks


def test_samples_of_a_prompt_read_its_state_once_each_and_write_their_own(make_rig_in_turn):
    rig = make_rig_in_turn(**ROOMY)
    rig.add("a", range(7), n=4, max_tokens=3)
    rig.run()
    (first,) = moves(rig, 0).values()
    forks = list(moves(rig, 1).values())
    assert first.source == -1
    assert [move.source for move in forks] == [first.slot] * 4
    assert len({first.slot, *(move.slot for move in forks)}) == 5
    assert set(moves(rig, 2).values()) == {None}, "from then on they continue in their slots"
    rig.assert_clean()


def test_samples_wait_for_slots_where_those_are_scarce_and_the_last_one_takes_the_prompts(make_rig_in_turn):
    rig = make_rig_in_turn(max_num_seqs=2, num_state_slots=3, block_size=4, state_interval=8)
    rig.add("a", range(7), n=3, max_tokens=3)
    rig.run()
    assert [list(moves(rig, step)) for step in range(4)] == [["0_a"], ["0_a", "1_a"], ["0_a", "1_a"], ["2_a"]]
    assert moves(rig, 3)["2_a"].source == moves(rig, 3)["2_a"].slot == moves(rig, 0)["0_a"].slot
    assert rig.core.stats.num_references_dropped == 0
    rig.assert_clean()


def test_as_many_slots_as_sequences_and_one_let_all_of_them_run(make_rig):
    rig = make_rig(**SCARCE, num_blocks=400)
    for index in range(8):
        rig.add(f"r{index}", [index] * 9, max_tokens=20)
    rig.run()
    stats = rig.core.stats
    assert (stats.num_preemptions, stats.num_references_dropped, stats.num_recomputed_tokens) == (0, 0, 0)
    assert max(len(work.scheduled) for work in rig.works) == 8
    rig.assert_clean()


@pytest.mark.quick(6)
@pytest.mark.parametrize("num_spare", [1, 2, 5, 30])
def test_no_snapshot_takes_the_slot_of_a_running_sequence(make_rig, num_spare):
    rig = make_rig(block_size=4, num_state_slots=8 + num_spare, state_interval=8, num_blocks=400)
    for index in range(30):
        rig.add(f"r{index}", [index] * (9 + 3 * (index % 7)), max_tokens=2 + index % 9)
    rig.run()
    stats = rig.core.stats
    assert (stats.num_preemptions, stats.num_references_dropped, stats.num_recomputed_tokens) == (0, 0, 0)
    rig.assert_clean()


# Snapshots


def test_a_known_prefix_is_found_at_intervals_and_at_the_last_block_of_a_prompt(make_rig):
    rig = make_rig(**ROOMY)
    rig.add("a", range(30), max_tokens=1)
    rig.run()
    for name, prompt in (("same", range(30)), ("to 20", [*range(20), 50, 51]), ("to 7", [*range(7), 50])):
        rig.add(name, prompt, max_tokens=1)
        rig.run()
    assert cached(rig, ("a", "same", "to 20", "to 7")) == [0, 28, 16, 0]
    rig.assert_clean()


@pytest.mark.quick(35)
@pytest.mark.parametrize("num_tokens", range(7, 13))
@pytest.mark.parametrize("sizes", [ROOMY, SCARCE], ids=["roomy", "scarce"])
def test_the_next_turn_computes_only_the_last_token_and_what_is_new(make_rig, num_tokens, sizes):
    rig = make_rig(**sizes)
    history = []
    for turn in "abc":
        history += [int(turn, 16), 20, 21]
        rig.add(turn, history, max_tokens=num_tokens - 3)
        rig.run()
        history += rig.tokens[turn, 0]
    assert cached(rig, "abc") == [0, num_tokens - 1, 2 * num_tokens - 1]
    rig.assert_clean()


def test_a_hit_inside_a_full_block_goes_on_there(make_rig):
    rig = make_rig(block_size=4, num_state_slots=64, state_interval=64)
    rig.add("turn 1", range(4), max_tokens=3)
    rig.run()
    prompt = [*range(4), *rig.tokens["turn 1", 0], 9]
    rig.add("turn 2", prompt, max_tokens=4)
    rig.run()
    rig.add("other turn 3", [*prompt, 50, 51], max_tokens=4)
    rig.run()
    assert cached(rig, ("turn 2", "other turn 3")) == [6, 6], "blocks of 8 tokens are known, and a state behind 6"
    rig.assert_clean()


def test_several_sequences_go_on_inside_one_full_block(make_rig):
    rig = make_rig(block_size=8, num_state_slots=64, state_interval=64)
    rig.add("turn 1", range(4), max_tokens=3)
    rig.run()
    prompt = [*range(4), *rig.tokens["turn 1", 0]]
    rig.add("turn 2", prompt, max_tokens=4)
    rig.run()
    prompt += rig.tokens["turn 2", 0]
    for name in "xyz":
        rig.add(name, [*prompt[:9], *[ord(name) - 60] * 9])
    rig.run()
    assert cached(rig, "xyz") == [6, 6, 6]
    assert rig.core.stats.num_block_copies == 3, "the block stays known"
    rig.assert_clean()


def test_kv_without_a_state_behind_it_is_computed_again(make_rig):
    rig = make_rig(**SCARCE)
    for name in "ab":
        rig.add(name, range(16), max_tokens=3)
        rig.run()
    assert cached(rig, "ab") == [0, 0]
    rig.assert_clean()


def test_the_snapshots_used_longest_ago_are_overwritten_first(make_rig):
    rig = make_rig(block_size=4, num_state_slots=7, max_num_seqs=2, state_interval=64)
    for name, first in (("a", 1), ("b", 2), ("a again", 1), ("c", 3), ("d", 4), ("a at last", 1), ("b at last", 2)):
        rig.add(name, [first] * 6, max_tokens=1)
        rig.run()
    assert cached(rig, ("a again", "a at last", "b at last")) == [4, 4, 0]
    rig.assert_clean()


def test_a_snapshot_that_no_slot_can_replace_is_overwritten(make_rig):
    rig = make_rig(block_size=4, max_num_seqs=1, num_state_slots=2, state_interval=8)
    rig.add("turn 1", range(4), max_tokens=3)
    rig.run()
    history = [*range(4), *rig.tokens["turn 1", 0]]
    for name in ("turn 2", "turn 2 again"):
        rig.add(name, [*history, 9], max_tokens=3)
        rig.run()
    assert cached(rig, ("turn 2", "turn 2 again")) == [6, 0]
    rig.assert_clean()


@pytest.mark.parametrize("forget", ["salt", "commit", "same version", "reset", "sleep"])
def test_snapshots_are_found_only_under_the_same_salt_and_version_and_until_they_are_forgotten(make_rig, forget):
    rig = make_rig(**ROOMY)
    rig.add("a", range(16), max_tokens=1)
    rig.run()
    assert rig.core.metrics().num_state_snapshots > 0
    if forget in ("commit", "same version"):
        rig.commit(int(forget == "commit"))
    elif forget == "reset":
        assert rig.core.reset_prefix_cache()
    elif forget == "sleep":
        rig.sleep(1, "abort")
        rig.wake_up()
    assert (rig.core.metrics().num_state_snapshots > 0) == (forget == "salt")
    rig.add("b", range(16), salt="x" if forget == "salt" else "")
    rig.run()
    assert cached(rig, "b") == [0]
    rig.assert_clean()


def test_states_of_a_sequence_that_broke_are_not_found_again(make_rig):
    rig = make_rig(**ROOMY)
    rig.errors[0] = "NaN logits"
    rig.add("a", range(16))
    rig.run()
    assert rig.core.metrics().num_state_snapshots == 0
    rig.add("b", range(16))
    rig.run()
    assert (rig.ends["a", 0].finish_reason, cached(rig, "b")) == ("error", [0])
    rig.assert_clean()


def test_states_over_kv_of_two_versions_are_not_found_again(make_rig):
    rig = make_rig(**ROOMY, max_num_batched_tokens=6)
    rig.add("mixed", range(15), max_tokens=8)
    rig.step()
    rig.commit(1)
    rig.run()
    rig.add("b", range(15))
    rig.run()
    assert cached(rig, "b") == [0]
    rig.assert_clean()


def test_prompts_whose_tokens_are_all_asked_for_are_computed_from_zeros(make_rig):
    rig = make_rig(**ROOMY)
    for name in "ab":
        rig.add(name, range(16), prompt_logprobs=1)
        rig.run()
    assert cached(rig, "ab") == [0, 0]
    rig.assert_clean()


# Requests that arrive together


def _arrive_together(rig, prompts):
    for index, prompt in enumerate(prompts):
        rig.add(f"r{index}", prompt, max_tokens=2)
    rig.run()
    rig.assert_clean()
    return cached(rig, (f"r{index}" for index in range(len(prompts))))


def test_equal_prompts_that_arrive_together_are_computed_once(make_rig):
    rig = make_rig(**ROOMY)
    assert _arrive_together(rig, [range(18)] * 8) == [0, *([16] * 7)]
    assert rig.executor.num_tokens_computed == 18 + 7 * 2 + 8


@pytest.mark.parametrize("interval, found", [(8, [0, 12, 8, 12, 8, 12]), (64, [0, 12, 0, 12, 0, 12])])
def test_prompts_that_begin_alike_wait_for_a_snapshot_of_what_they_share(make_rig, interval, found):
    rig = make_rig(**(ROOMY | dict(state_interval=interval)))
    system = list(range(8))
    assert _arrive_together(rig, [system + [30 + group] * 6 for group in range(3) for _ in range(2)]) == found


def test_no_prompt_waits_for_kv_without_a_state(make_rig_in_turn):
    rig = make_rig_in_turn(block_size=4, num_state_slots=64, state_interval=64)
    for name, end in (("a", 30), ("b", 31), ("a again", 30)):
        rig.add(name, [*range(8), *([end] * 6)])
    rig.step()
    assert [rig.label(row.sequence_id) for row in rig.works[-1].scheduled] == ["a", "b"]
    rig.run()
    rig.assert_clean()


def test_no_prompt_waits_where_no_snapshot_is_taken(make_rig_in_turn):
    rig = make_rig_in_turn(**SCARCE)
    for name in "ab":
        rig.add(name, range(16))
    rig.step()
    assert [rig.label(row.sequence_id) for row in rig.works[-1].scheduled] == ["a", "b"]
    rig.run()
    rig.assert_clean()


def test_a_wait_ends_with_the_request_that_was_waited_for(make_rig):
    rig = make_rig(**ROOMY, max_num_batched_tokens=4)
    for name in ("first", "second"):
        rig.add(name, range(20))
    rig.step()
    rig.abort("first")
    rig.run()
    assert rig.ends["second", 0].finish_reason == "length"
    rig.assert_clean()


def test_a_wait_ends_once_the_snapshot_is_taken(make_rig):
    rig = make_rig(**ROOMY)
    for name in ("first", "second"):
        rig.add(name, range(20), max_tokens=40)
    for _ in range(4):
        rig.step()
    assert rig.tokens["second", 0] and ("first", 0) not in rig.ends
    rig.run()
    rig.assert_clean()


# Drafts


def test_the_state_behind_the_last_right_draft_is_kept(make_rig):
    rigs = [make_oracle_rig(make_rig, right=right, **ROOMY, max_num_seqs=2) for right in (1.0, 0.5)]
    if rigs[0].config.async_scheduling:
        pytest.skip("nothing is drafted behind a step in flight")
    for rig in rigs:
        for name in "ab":
            rig.add(name, [ord(name) - 60] * 6, max_tokens=60)
        rig.run()
        rig.assert_clean()
        rows = [row for work in rig.works for row in work.scheduled if row.draft_token_ids]
        assert all([num for num, _ in row.state.others] == [*range(1, row.num_scheduled_tokens)] for row in rows)
    right, mixed = (rig.core.stats for rig in rigs)
    assert right.num_steps < mixed.num_steps < 60
    assert sum(mixed.drafts.num_drafted) > sum(mixed.drafts.num_accepted) > 20


def test_drafts_are_cut_to_the_slots_that_are_free(make_rig):
    rig = make_oracle_rig(make_rig, right=1.0, block_size=4, max_num_seqs=2, num_state_slots=4, state_interval=8)
    if rig.config.async_scheduling:
        pytest.skip("nothing is drafted behind a step in flight")
    for name in "ab":
        rig.add(name, [ord(name) - 60] * 6, max_tokens=40)
    rig.run()
    rig.assert_clean()
    drafted = [sum(len(row.draft_token_ids) for row in work.scheduled) for work in rig.works]
    assert 0 < max(drafted) <= 3
    assert sum(rig.core.stats.drafts.num_accepted) > 20


# Sizes and figures


def test_usage_counts_the_slots_of_live_requests(make_rig_in_turn):
    rig = make_rig_in_turn(block_size=4, num_state_slots=20, state_interval=64)
    rig.add("a", range(6), n=2, max_tokens=4)
    rig.step()
    rig.step()
    metrics = rig.core.metrics()
    assert (metrics.num_state_slots, metrics.num_state_snapshots) == (20, 1)
    assert metrics.state_usage == pytest.approx(2 / 20)
    rig.run()
    rig.assert_clean()


def test_a_model_without_states_moves_none(make_rig):
    rig = make_rig()
    rig.add("a", n=3)
    rig.run()
    assert all(row.state is None for work in rig.works for row in work.scheduled)
    assert rig.core.metrics().num_state_slots == 0
    rig.assert_clean()


@pytest.mark.parametrize("wrong", [dict(num_state_slots=8), dict(num_state_slots=9, state_interval=6)])
def test_sizes_that_cannot_work_are_refused(wrong):
    sizes = dict(num_blocks=8, block_size=4, max_model_len=32, max_num_seqs=8, max_num_batched_tokens=8, vocab_size=9)
    with pytest.raises(AssertionError, match=next(reversed(wrong))):
        CoreConfig(**sizes, **wrong)
