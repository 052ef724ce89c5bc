"""Sleep at level 0 stops the scheduling of requests and releases no memory."""

import pytest

from tests.unit.core.test_pausing_and_sleeping import add_and_step


@pytest.fixture
def rig(make_rig):
    return make_rig()


@pytest.mark.parametrize("tags", [None, ["scheduling"], "scheduling"])
def test_level_0_stops_scheduling_and_keeps_all_memory(rig, tags):
    add_and_step(rig)
    usage = rig.core.cache_usage()
    rig.sleep(0, "keep")
    assert rig.core.lifecycle.asleep == {"scheduling"} and not rig.core.can_progress()
    assert rig.core.lifecycle.describe() == "ASLEEP(level 0: scheduling)" and rig.core.cache_usage() == usage
    rig.add("late")
    rig.core.wake_up(["weights", "kv_cache"])
    assert rig.core.lifecycle.asleep
    rig.update()
    rig.wake_up(tags)
    assert not rig.core.lifecycle.asleep
    rig.run()
    rig.assert_clean()


def test_level_0_becomes_deeper_and_nothing_else_becomes_level_0(rig):
    rig.sleep(0, "abort")
    rig.sleep(1, "abort")
    assert rig.core.lifecycle.asleep == {"weights", "kv_cache"} and rig.core.lifecycle.level == 1
    rig.sleep(0, "abort")
    assert rig.core.lifecycle.asleep == {"weights", "kv_cache"} and rig.core.lifecycle.level == 1
    rig.wake_up()
    rig.assert_clean()


def test_level_0_in_mode_wait_lets_requests_end_first(rig):
    add_and_step(rig)
    rig.sleep(0, "wait")
    assert not rig.core.lifecycle.asleep
    while rig.core.can_progress():
        rig.step()
    assert rig.core.lifecycle.asleep == {"scheduling"} and len(rig.ends) == 4
    rig.wake_up()
    rig.assert_clean()
