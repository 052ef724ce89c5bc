import pytest

from rollout_engine.base.errors import DirtyWeightsError, LifecycleError, RetryableError, StepMemoryError
from rollout_engine.core.lifecycle import MODES


@pytest.fixture
def rig(make_rig):
    return make_rig()


def add_and_step(rig, num_steps=3, **fields):
    rig.add("a", max_tokens=10, **fields)
    rig.add("group", range(40, 60), max_tokens=10, n=3)
    for _ in range(num_steps):
        rig.step()


def num_tokens(rig):
    return sum(map(len, rig.tokens.values()))


# Pausing


def test_abort_ends_what_is_in_flight_with_the_tokens_it_has(rig):
    add_and_step(rig)
    rig.pause("abort")
    assert {end.finish_reason for end in rig.ends.values()} == {"abort"} and len(rig.ends) == 4
    assert num_tokens(rig) == 4 * 3
    rig.assert_clean()


def test_keep_freezes_at_a_step_boundary_and_goes_on_to_the_same_tokens(rig):
    add_and_step(rig)
    rig.pause("keep")
    computed, returned = rig.executor.num_tokens_computed, num_tokens(rig)
    for _ in range(5):
        assert rig.step() == []
    assert not rig.core.can_progress() and rig.core.has_unfinished_requests()
    rig.resume()
    rig.run()
    assert num_tokens(rig) == 4 * 10
    assert rig.executor.num_tokens_computed == computed + 4 * 10 - returned, "nothing is computed twice"
    rig.assert_clean()


def test_wait_finishes_what_is_in_flight_and_nothing_that_comes_later(rig):
    add_and_step(rig)
    rig.pause("wait")
    rig.add("late")
    assert rig.core.lifecycle.draining
    while rig.core.can_progress():
        rig.step()
    assert not rig.core.lifecycle.draining
    assert len(rig.ends) == 4 and rig.tokens["late", 0] == []
    rig.resume()
    rig.run()
    rig.assert_clean()


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_waiting_is_over_when_the_last_request_is_aborted_or_fails(rig, end):
    rig.add("a")
    rig.step()
    rig.pause("wait")
    if end == "abort":
        rig.abort("a")
    else:
        rig.fail_at_steps.add(rig.next_step)
        rig.step()
        rig.step()
    assert not rig.core.lifecycle.draining
    rig.assert_clean()


def test_a_wait_can_be_cut_short_and_called_off(rig):
    add_and_step(rig)
    rig.pause("wait")
    rig.pause("keep")
    assert not rig.core.lifecycle.draining and rig.step() == []
    rig.pause("wait")
    rig.resume()
    assert not rig.core.lifecycle.draining
    rig.run()
    rig.assert_clean()


@pytest.mark.parametrize("mode", MODES)
def test_requests_that_come_while_paused_wait_for_resume_through_any_pause(rig, mode):
    rig.pause("keep")
    rig.add("a", n=2)
    rig.pause(mode)
    assert rig.step() == [] and rig.ends == {}
    assert rig.core.metrics().num_waiting == 2
    rig.resume()
    rig.run()
    rig.assert_clean()
    assert {end.finish_reason for end in rig.ends.values()} == {"length"}


def test_held_requests_run_by_priority_then_arrival(rig):
    rig.pause("keep")
    for name, priority in (("late", 1), ("first", 0), ("second", 0)):
        rig.add(name, range(3), priority=priority)
    rig.resume()
    rig.step()
    assert [rig.label(row.sequence_id) for row in rig.works[-1].scheduled] == ["first", "second", "late"]
    rig.run()


def test_a_request_aborted_while_it_waits_for_resume_has_no_tokens(rig):
    rig.pause("keep")
    rig.add("a", n=3)
    rig.add("b")
    rig.abort("0_a")
    rig.abort("b")
    assert rig.ends["b", 0].finish_reason == "abort" and rig.tokens["b", 0] == []
    rig.resume()
    rig.run()
    assert [len(rig.tokens["a", index]) for index in range(3)] == [0, 8, 8]
    rig.assert_clean()


def test_the_runner_forgets_what_has_ended_while_paused(rig):
    add_and_step(rig)
    rig.pause("keep")
    rig.abort("a", "group")
    rig.step()
    assert rig.executor.sequences == {}


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_pause_that_clears_the_cache_leaves_nothing_to_be_found(rig, mode):
    rig.add("a", range(24), max_tokens=6)
    rig.step()
    rig.pause(mode, clear_cache=True)
    while rig.core.can_progress():
        rig.step()
    rig.resume()
    rig.add("b", range(24))
    rig.run()
    assert rig.num_cached_tokens.get("b", 0) == 0
    rig.assert_clean()


@pytest.mark.parametrize("clear_cache", [False, True])
def test_requests_kept_by_a_pause_that_clears_the_cache_compute_their_kv_again(rig, clear_cache):
    rig.add("a", range(24), max_tokens=6)
    rig.step()
    rig.pause("keep", clear_cache=clear_cache)
    rig.resume()
    rig.run()
    assert rig.executor.num_tokens_computed == 24 + 5 + (24 + rig.config.async_scheduling if clear_cache else 0)
    rig.assert_clean()


@pytest.mark.parametrize("called_off", [False, True])
def test_a_pause_clears_the_cache_only_if_it_is_asked_to_itself(rig, called_off):
    rig.add("a", range(24))
    rig.step()
    rig.pause("wait", clear_cache=True)
    if not called_off:
        while rig.core.can_progress():
            rig.step()
    rig.resume()
    rig.add("b", range(24))
    rig.run()
    rig.pause("keep")
    rig.resume()
    rig.add("c", range(24))
    rig.run()
    assert rig.num_cached_tokens.get("c", 0) == 20
    rig.assert_clean()


# Admission


@pytest.mark.parametrize("state", ["paused", "asleep"])
def test_reject_turns_requests_away_until_the_engine_runs_again(make_rig, state):
    rig = make_rig(admission="reject")
    rig.pause("keep") if state == "paused" else rig.sleep(1, "abort")
    with pytest.raises(RetryableError, match=r"The engine is (PAUSED\(keep\)|ASLEEP.*) and takes no requests"):
        rig.add("a")
    rig.resume() if state == "paused" else rig.wake_up()
    rig.add("a")
    rig.run()
    rig.assert_clean()


def test_a_request_for_dirty_weights_is_refused(rig):
    rig.update(breaks_off=True)
    with pytest.raises(DirtyWeightsError, match="add_request: the live weights are incomplete"):
        rig.add("a")
    rig.update()
    rig.add("a")
    rig.run()
    rig.assert_clean()


@pytest.mark.parametrize("ends_well", [True, False])
def test_requests_that_come_while_weights_are_overwritten_wait_for_whole_ones(rig, ends_well):
    rig.core.begin_update()
    rig.core.lifecycle.stop_for_update()
    rig.add("a")
    assert rig.step() == [] and not rig.core.can_progress()
    if ends_well:
        rig.executor.weights = "live"
        rig.commit(1)
    rig.core.end_update(dirty=not ends_well)
    if not ends_well:
        with pytest.raises(DirtyWeightsError):
            rig.add("b")
        assert rig.step() == []
        rig.update()
    rig.run()
    assert num_tokens(rig) == 8 and rig.ends["a", 0].policy_version == 1
    rig.assert_clean()


def test_reject_turns_requests_away_while_weights_are_overwritten(make_rig):
    rig = make_rig(admission="reject")
    rig.core.begin_update()
    rig.core.lifecycle.stop_for_update()
    with pytest.raises(RetryableError, match="The engine is UPDATING and takes no requests"):
        rig.add("a")
    rig.core.end_update(dirty=False)
    rig.add("a")
    rig.run()
    rig.assert_clean()


def test_requests_in_flight_wait_out_dirty_weights(rig):
    add_and_step(rig)
    rig.update(breaks_off=True)
    rig.step()
    assert rig.step() == [] and rig.ends == {}
    rig.update()
    rig.run()
    assert num_tokens(rig) == 4 * 10
    rig.assert_clean()


# Sleeping


@pytest.mark.parametrize("level", [1, 2])
def test_requests_kept_over_a_sleep_compute_their_kv_again_to_the_same_tokens(rig, level):
    add_and_step(rig)
    rig.sleep(level, "keep")
    assert rig.core.cache_usage() == 0.0 and rig.step() == []
    rig.add("late")
    rig.wake_up()
    if level == 2:
        rig.update()
    rig.run()
    assert num_tokens(rig) == 4 * 10 + 8
    rig.assert_clean()


def test_sleep_aborts_by_default(rig):
    add_and_step(rig)
    rig._record(rig.core.sleep())
    assert {end.finish_reason for end in rig.ends.values()} == {"abort"}
    rig.wake_up()
    rig.assert_clean()


def test_sleep_in_mode_wait_falls_asleep_after_the_last_request(rig):
    add_and_step(rig)
    rig.sleep(1, "wait")
    rig.add("late")
    assert not rig.core.lifecycle.asleep
    with pytest.raises(LifecycleError, match="resume_generation: not possible while the engine is RUNNING, draining"):
        rig.resume()
    while rig.core.can_progress():
        assert not rig.core.lifecycle.asleep
        rig.step()
    assert rig.core.lifecycle.asleep and len(rig.ends) == 4
    rig.wake_up()
    rig.run()
    rig.assert_clean()


def test_aborting_hastens_a_sleep_that_waits(rig):
    add_and_step(rig)
    rig.sleep(2, "wait")
    rig.pause("abort")
    assert rig.core.lifecycle.asleep == {"weights", "kv_cache"}
    rig.wake_up()
    rig.update()
    rig.resume()
    rig.assert_clean()


def test_nothing_of_the_cache_survives_a_sleep(rig):
    rig.add("a", range(24))
    rig.run()
    rig.sleep(1, "abort")
    rig.wake_up()
    rig.add("b", range(24))
    rig.run()
    assert rig.num_cached_tokens.get("b", 0) == 0
    rig.assert_clean()


def test_the_pool_may_sleep_on_while_weights_are_updated(rig):
    add_and_step(rig)
    rig.sleep(2, "keep")
    with pytest.raises(LifecycleError, match=r"update_weights: .* ASLEEP.*; call wake_up\(\['weights'\]\) first"):
        rig.update()
    rig.wake_up(["weights"])
    rig.update()
    assert rig.step() == []
    rig.wake_up(["kv_cache"])
    rig.run()
    assert num_tokens(rig) == 4 * 10
    rig.assert_clean()


@pytest.mark.parametrize("tags", [None, ["weights"]])
def test_an_engine_whose_weights_have_no_room_sleeps_on_and_may_be_woken_again(rig, monkeypatch, tags):
    add_and_step(rig)
    rig.sleep(1, "keep")

    def fail():
        raise StepMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(rig.core._executor, "restore_weights", fail)
        with pytest.raises(StepMemoryError, match="no room"):
            rig.wake_up(tags)
    assert rig.core.lifecycle.describe() == "ASLEEP(level 1: kv_cache, weights)"
    assert rig.step() == []
    rig.wake_up()
    rig.run()
    assert num_tokens(rig) == 4 * 10
    rig.assert_clean()


def test_abort_works_while_asleep(rig):
    add_and_step(rig)
    rig.sleep(1, "keep")
    rig.abort("a", "group")
    assert {end.finish_reason for end in rig.ends.values()} == {"abort"}
    rig.wake_up()
    rig.assert_clean()


# Resetting the prefix cache


def test_reset_changes_nothing_while_requests_hold_blocks(rig):
    rig.add("a", range(24), max_tokens=12)
    rig.step()
    assert rig.core.reset_prefix_cache() is False
    rig.add("b", range(24))
    rig.run()
    assert rig.num_cached_tokens.get("b", 0) == 20
    assert rig.core.reset_prefix_cache() is True
    rig.add("c", range(24))
    rig.run()
    assert rig.num_cached_tokens.get("c", 0) == 0
    rig.assert_clean()


def test_reset_of_running_requests_computes_them_again_to_the_same_tokens(rig):
    add_and_step(rig)
    assert rig.core.reset_prefix_cache(reset_running_requests=True) is True
    assert rig.core.cache_usage() == 0.0
    rig.run()
    assert num_tokens(rig) == 4 * 10
    rig.assert_clean()


# The end


def test_every_verb_of_a_dead_engine_says_so(rig):
    rig.core.shutdown()
    for verb in ("step", "resume", "pause", "sleep", "wake_up", "reset_prefix_cache", "begin_update"):
        with pytest.raises(LifecycleError, match="the engine is DEAD: it was shut down"):
            getattr(rig.core, verb)()
    with pytest.raises(LifecycleError, match="add_request: .* DEAD"):
        rig.add("a")


def test_a_pause_that_waits_is_complete_once_the_ends_that_a_reset_came_upon_are_returned(make_rig):
    rig = make_rig()
    rig.add("a", max_tokens=6)
    rig.step()
    rig.pause("wait")
    while rig.core.lifecycle.draining:
        rig.core.reset_prefix_cache(reset_running_requests=False)
        rig.core.check_integrity()
        assert rig.core.can_progress()
        rig.step()
    assert rig.ends["a", 0].finish_reason == "length" and not rig.core.has_unfinished_requests()
