"""Whose KV may serve whom: prefixes, salts, collisions and policy versions."""

import pytest

from rollout_engine.base.errors import WeightUpdateError
from rollout_engine.core import prefix_cache


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


@pytest.mark.parametrize("num_tokens", range(7, 13))
def test_the_next_turn_computes_only_the_last_token_and_what_is_new(make_rig, num_tokens):
    rig = make_rig(block_size=4)
    history = []
    for turn in "abc":
        history += [int(turn, 16), 20, 21]
        rig.add(turn, history, max_tokens=num_tokens - 3)
        rig.run()
        history += rig.tokens[turn, 0]
    assert [rig.ends[turn, 0].num_cached_tokens for turn in "abc"] == [0, num_tokens - 1, 2 * num_tokens - 1]
    assert rig.core.stats.num_block_copies == 0
    rig.assert_clean()


def test_a_turn_of_a_few_tokens_is_found_again(make_rig):
    rig = make_rig(block_size=16)
    rig.add("a", [1], max_tokens=2)
    rig.run()
    rig.add("b", [1, *rig.tokens["a", 0], 5])
    rig.run()
    assert rig.ends["b", 0].num_cached_tokens == 2
    rig.assert_clean()


def _first_turn(rig):
    """Seven tokens in blocks of four; the last of them has no KV."""
    rig.add("turn 1", range(4), max_tokens=3)
    rig.run()
    return [*range(4), *rig.tokens["turn 1", 0]]


def test_turns_that_part_share_the_last_block_of_the_turn_before(make_rig):
    rig = make_rig(block_size=4)
    history = _first_turn(rig)
    for name in "abc":
        rig.add(name, [*history, ord(name) - 40])
    rig.run()
    assert [rig.ends[name, 0].num_cached_tokens for name in "abc"] == [6, 4, 4]  # the first one goes on in it
    rig.assert_clean()


def test_the_longest_of_several_tails_is_found(make_rig):
    rig = make_rig(block_size=8)
    for name, num_tokens in zip("abc", (2, 6, 4), strict=True):
        rig.add(name, [1, 2], max_tokens=num_tokens, seed=0)
        rig.run()
    rig.add("d", [1, 2, *rig.tokens["b", 0]], max_tokens=1)
    rig.run()
    assert rig.ends["d", 0].num_cached_tokens == 7
    rig.assert_clean()


@pytest.mark.parametrize(
    "change, salt, version", [(-1, "", None), (5, "", None), (-1, "x", None), (-1, "", 1), (-1, "", 0)]
)
def test_a_tail_is_found_only_under_the_same_tokens_salt_and_version(make_rig, change, salt, version):
    rig = make_rig(block_size=4)
    prompt = [*_first_turn(rig), 9]
    if change >= 0:
        prompt[change] += 1
    if version is not None:
        rig.commit(version)
    rig.add("turn 2", prompt, salt=salt)
    rig.run()
    expected = 4 if change == 5 else 0 if salt or version is not None else 6
    assert rig.ends["turn 2", 0].num_cached_tokens == expected
    rig.assert_clean()


def test_a_tail_that_was_overwritten_is_not_found(make_rig):
    rig = make_rig(num_blocks=6, block_size=4)
    history = _first_turn(rig)
    rig.add("other", [50] * 20, max_tokens=1)
    rig.run()
    rig.add("turn 2", [*history, 9], max_tokens=1)
    rig.run()
    assert rig.ends["turn 2", 0].num_cached_tokens == 4
    rig.assert_clean()


def test_siblings_that_end_at_once_leave_a_tail_that_others_do_not_write(make_rig):
    rig = make_rig(block_size=4)
    rig.add("many", range(6), n=8, max_tokens=6, eos=range(40))
    rig.run()
    for index in range(8):
        rig.add(f"next {index}", [*range(6), *rig.tokens["many", index], 9], max_tokens=2)
    rig.run()
    assert all(rig.ends[f"next {index}", 0].num_cached_tokens >= 4 for index in range(8))
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


def test_a_tail_that_a_failed_step_was_to_copy_is_not_found(make_rig, monkeypatch):
    rig = make_rig(block_size=4)
    rig.add("many", range(6), n=3, max_tokens=6, eos=range(97))
    execute = rig.executor.execute

    def fail_once(work):
        if work.block_copies:
            monkeypatch.undo()
            raise RuntimeError("no copies")
        return execute(work)

    monkeypatch.setattr(rig.executor, "execute", fail_once)
    rig.run()
    for index in range(3):
        rig.add(f"next {index}", [*range(6), *rig.tokens["many", index], 9], max_tokens=2)
    rig.run()
    rig.assert_clean()


# Requests that come together


def _come_together(rig, prompts):
    for index, prompt in enumerate(prompts):
        rig.add(f"r{index}", prompt, max_tokens=2)
    rig.run()
    rig.assert_clean()
    return [rig.ends[f"r{index}", 0].num_cached_tokens for index in range(len(prompts))]


def test_equal_prompts_that_come_together_are_computed_once(make_rig):
    rig = make_rig(block_size=4)
    assert _come_together(rig, [range(18)] * 8) == [0, *([16] * 7)]
    assert rig.executor.num_tokens_computed == 18 + 7 * 2 + 8


def test_prompts_that_begin_alike_wait_for_what_they_share_only(make_rig):
    rig = make_rig(block_size=4)
    system = list(range(8))
    prompts = [system + [30 + group] * 6 for group in range(3) for _ in range(2)]
    assert _come_together(rig, prompts) == [0, 12, 8, 12, 8, 12]


def test_other_prompts_do_not_wait(make_rig_in_turn):
    rig = make_rig_in_turn(block_size=4)
    for name, token in (("a", 1), ("like a", 1), ("b", 2)):
        rig.add(name, [token] * 10)
    rig.step()
    assert [rig.label(row.sequence_id) for row in rig.works[-1].scheduled] == ["a", "b"]
    rig.run()
    rig.assert_clean()


def test_nobody_waits_for_a_request_that_was_aborted(make_rig):
    rig = make_rig(block_size=4, max_num_batched_tokens=4)
    for name in ("first", "second"):
        rig.add(name, range(20))
    rig.step()
    rig.abort("first")
    rig.run()
    assert rig.ends["second", 0].finish_reason == "length"
    rig.assert_clean()


def test_nobody_waits_for_kv_of_another_version(make_rig):
    rig = make_rig(block_size=4, max_num_batched_tokens=6)
    for name in ("old", "new"):
        rig.add(name, range(20), max_tokens=20)
    rig.step()
    rig.commit(1)
    rig.run()
    assert rig.ends["new", 0].num_cached_tokens == 0
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


@pytest.mark.parametrize("forget", ["commit", "reset"])
def test_blocks_of_forgotten_kv_are_written_again_before_new_ones(make_rig, forget):
    rig = make_rig(block_size=4)
    for turn in range(6):
        rig.add(f"turn {turn}", range(turn, turn + 16), max_tokens=4)
        rig.run()
        assert rig.commit(turn + 1) == 0 if forget == "commit" else rig.core.reset_prefix_cache()
    written = {block for work in rig.works for row in work.scheduled for block in row.block_ids}
    assert written == set(range(5))
    rig.assert_clean()


def test_keep_goes_on_over_old_kv_and_says_so(make_rig_in_turn):
    rig = make_rig_in_turn()
    rig.add("a", max_tokens=4)
    spans = [rig.step()[0] for _ in range(2)]
    assert rig.commit(5) == 1
    spans += [rig.step()[0] for _ in range(2)]
    assert [(s.policy_version, s.kv_min_version) for s in spans] == [(0, 0), (0, 0), (5, 0), (5, 0)]
    rig.assert_clean()


def test_recompute_makes_the_next_token_exact_under_the_new_policy(make_rig_in_turn):
    rig = make_rig_in_turn()
    rig.add("a", range(3), n=2, max_tokens=4)
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


def test_a_tail_with_kv_of_two_versions_is_not_published(make_rig_in_turn):
    rig = make_rig_in_turn(block_size=16)
    rig.add("mixed", [1, 2], max_tokens=4)
    rig.step()
    rig.commit(1)
    rig.run()
    rig.add("b", [1, 2, *rig.tokens["mixed", 0]])
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
