"""Every verb in every state: allowed, a no-op, or refused by name."""

import copy

import pytest

from rollout_engine.base.errors import DirtyWeightsError, LifecycleError
from rollout_engine.core.lifecycle import MODES, Lifecycle


def running():
    return Lifecycle()


def paused(mode="keep"):
    lifecycle = running()
    lifecycle.pause(mode, in_flight=False)
    return lifecycle


def draining():
    lifecycle = running()
    lifecycle.pause("wait", in_flight=True)
    return lifecycle


def updating():
    lifecycle = running()
    lifecycle.begin_update()
    return lifecycle


def asleep(level=1):
    lifecycle = running()
    lifecycle.sleep(level, "abort", in_flight=False)
    lifecycle.finish_draining()
    return lifecycle


def half_awake():
    lifecycle = asleep()
    lifecycle.wake_up(["weights"])
    return lifecycle


def falling_asleep():
    lifecycle = running()
    lifecycle.sleep(1, "wait", in_flight=True)
    return lifecycle


def dirty():
    lifecycle = asleep(level=2)
    lifecycle.wake_up(None)
    return lifecycle


def updating_dirty():
    lifecycle = dirty()
    lifecycle.begin_update()
    return lifecycle


def dead():
    lifecycle = running()
    lifecycle.shut_down()
    return lifecycle


STATES = {
    "RUNNING": running,
    "PAUSED": paused,
    "PAUSED, draining": draining,
    "UPDATING": updating,
    "ASLEEP": asleep,
    "ASLEEP, weights awake": half_awake,
    "RUNNING, draining": falling_asleep,
    "DIRTY": dirty,
    "UPDATING, weights incomplete": updating_dirty,
    "DEAD": dead,
}


def fall_asleep(lifecycle):
    lifecycle.sleep(1, "keep", in_flight=False)
    lifecycle.finish_draining()


VERBS = {
    "pause_generation": lambda lifecycle: lifecycle.pause("keep", in_flight=False),
    "resume_generation": lambda lifecycle: lifecycle.resume(),
    "sleep": fall_asleep,
    "wake_up": lambda lifecycle: lifecycle.wake_up(None),
    "update_weights": lambda lifecycle: lifecycle.begin_update(),
    "generate": lambda lifecycle: lifecycle.require_running("generate"),
    "score": lambda lifecycle: lifecycle.require_weights("score"),
}
# State -> verb -> what the state is afterwards; "refused", or "dirty" for `DirtyWeightsError`.
TABLE = {
    "RUNNING": "PAUSED RUNNING ASLEEP RUNNING UPDATING RUNNING RUNNING",
    "PAUSED": "PAUSED RUNNING ASLEEP PAUSED UPDATING refused PAUSED",
    "PAUSED, draining": "PAUSED RUNNING refused PAUSED UPDATING refused PAUSED",
    "UPDATING": "UPDATING refused refused refused refused UPDATING UPDATING",
    "ASLEEP": "ASLEEP refused ASLEEP RUNNING refused refused refused",
    "ASLEEP, weights awake": "ASLEEP refused ASLEEP RUNNING UPDATING refused ASLEEP",
    "RUNNING, draining": "refused refused refused refused refused refused RUNNING",
    "DIRTY": "DIRTY DIRTY ASLEEP DIRTY UPDATING dirty dirty",
    "UPDATING, weights incomplete": "UPDATING refused refused refused refused UPDATING refused",
    "DEAD": "refused refused refused refused refused refused refused",
}
CASES = [
    (state, verb, outcome) for state, row in TABLE.items() for verb, outcome in zip(VERBS, row.split(), strict=True)
]


@pytest.mark.parametrize(("state", "verb", "outcome"), CASES)
def test_every_verb_in_every_state(state, verb, outcome):
    lifecycle = STATES[state]()
    before = copy.deepcopy(vars(lifecycle))
    if outcome in ("refused", "dirty"):
        with pytest.raises(LifecycleError if outcome == "refused" else DirtyWeightsError, match=f"^{verb}: ") as error:
            VERBS[verb](lifecycle)
        assert outcome == "dirty" or lifecycle.describe() in str(error.value)
        assert vars(lifecycle) == before
    else:
        VERBS[verb](lifecycle)
        assert lifecycle.state == outcome


@pytest.mark.parametrize("state", STATES)
def test_exactly_these_states_compute_and_take_requests(state):
    lifecycle = STATES[state]()
    assert lifecycle.can_step == (state in ("RUNNING", "UPDATING", "PAUSED, draining", "RUNNING, draining"))
    assert lifecycle.admits == (state in ("RUNNING", "UPDATING"))


@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("second", MODES)
def test_pausing_twice_in_any_mode_is_one_pause(first, second):
    lifecycle = paused(first)
    lifecycle.pause(second, in_flight=False)
    assert (lifecycle.state, lifecycle.paused) == ("PAUSED", second)
    lifecycle.resume()
    lifecycle.resume()
    assert lifecycle.state == "RUNNING"


def test_a_refused_update_names_the_verb_that_was_called():
    lifecycle = Lifecycle()
    lifecycle.begin_update("begin_weight_update")
    with pytest.raises(LifecycleError, match="^begin_weight_update: not possible while the engine is UPDATING"):
        lifecycle.begin_update("begin_weight_update")
    lifecycle = asleep(level=1)
    with pytest.raises(LifecycleError, match="^begin_weight_update: .* not resident"):
        lifecycle.begin_update("begin_weight_update")


def test_a_pause_outlives_sleep_and_updates():
    lifecycle = paused("keep")
    fall_asleep(lifecycle)
    lifecycle.wake_up(None)
    lifecycle.begin_update()
    lifecycle.end_update(dirty=False)
    assert (lifecycle.state, lifecycle.paused) == ("PAUSED", "keep")


def test_sleeping_deeper_forgets_the_weights_and_sleeping_lighter_does_not_bring_them_back():
    lifecycle = asleep(level=1)
    for level in (2, 1):
        lifecycle.sleep(level, "abort", in_flight=False)
        lifecycle.finish_draining()
    lifecycle.wake_up(None)
    assert lifecycle.state == "DIRTY"


def test_the_colocated_order_wakes_weights_updates_and_wakes_kv():
    lifecycle = asleep(level=2)
    assert lifecycle.wake_up(["weights"]) == {"weights"}
    assert lifecycle.state == "DIRTY"
    lifecycle.begin_update()
    lifecycle.end_update(dirty=False)
    assert lifecycle.state == "ASLEEP" and not lifecycle.can_step
    assert lifecycle.wake_up(["kv_cache"]) == {"kv_cache"}
    assert lifecycle.wake_up(None) == set()
    assert lifecycle.state == "RUNNING"


def test_what_a_sleep_forgot_is_named_until_a_complete_update_has_come():
    lifecycle = asleep(level=2)
    lifecycle.wake_up(None)
    for dirty in (None, True):  # refused, and ended half-way
        lifecycle.begin_update()
        lifecycle.end_update(dirty=dirty)
        with pytest.raises(
            DirtyWeightsError, match=r"add_request: .* incomplete: sleep\(level=2\) forgot them. Send a"
        ):
            lifecycle.require_clean("add_request")
    lifecycle.begin_update()
    lifecycle.end_update(dirty=False)
    lifecycle.require_clean("add_request")
    lifecycle.begin_update()
    lifecycle.end_update(dirty=True)
    with pytest.raises(DirtyWeightsError, match="incomplete: an update ended half-way"):
        lifecycle.require_clean("add_request")


def test_kv_that_wakes_first_leaves_the_weights_asleep():
    lifecycle = asleep(level=2)
    assert lifecycle.wake_up("kv_cache") == {"kv_cache"}
    assert (lifecycle.state, lifecycle.dirty) == ("ASLEEP", False)
    lifecycle.wake_up(("weights",))
    assert lifecycle.state == "DIRTY"


def test_only_a_complete_update_clears_dirty():
    lifecycle = dirty()
    lifecycle.begin_update()
    lifecycle.end_update(dirty=None)
    assert lifecycle.state == "DIRTY"
    fall_asleep(lifecycle)
    lifecycle.wake_up(None)
    lifecycle.resume()
    assert lifecycle.state == "DIRTY"
    lifecycle.begin_update()
    lifecycle.end_update(dirty=False)
    assert lifecycle.state == "RUNNING"


def test_a_pause_during_an_update_holds_after_it():
    lifecycle = updating()
    lifecycle.pause("keep", in_flight=True)
    assert lifecycle.state == "UPDATING" and not lifecycle.can_step
    lifecycle.end_update(dirty=False)
    assert lifecycle.state == "PAUSED"


@pytest.mark.parametrize("state", [asleep, dirty])
@pytest.mark.parametrize("verb", ["pause", "sleep"])
def test_frozen_requests_cannot_be_waited_for(state, verb):
    lifecycle = state()
    arguments = ("wait",) if verb == "pause" else (1, "wait")
    with pytest.raises(LifecycleError, match="requests in flight cannot finish now"):
        getattr(lifecycle, verb)(*arguments, in_flight=True)
    getattr(lifecycle, verb)(*arguments, in_flight=False)


@pytest.mark.parametrize(
    ("verb", "arguments", "message"),
    [
        ("pause", ("stop",), "pause_generation: mode='stop' is not allowed: must be 'abort', 'wait' or 'keep'"),
        ("sleep", (3, "abort"), "sleep: level=3 is not allowed: must be 0, 1 or 2"),
        ("sleep", (1, "drop"), "sleep: mode='drop' is not allowed"),
    ],
)
def test_unknown_modes_and_levels_are_named(verb, arguments, message):
    lifecycle = running()
    with pytest.raises(LifecycleError, match=message):
        getattr(lifecycle, verb)(*arguments, in_flight=True)
    assert lifecycle.state == "RUNNING"


def test_unknown_tags_are_named_and_nothing_wakes():
    lifecycle = asleep()
    with pytest.raises(LifecycleError, match=r"wake_up: tags=\['kv'\] is not allowed"):
        lifecycle.wake_up(["weights", "kv"])
    assert lifecycle.asleep == {"weights", "kv_cache"}
