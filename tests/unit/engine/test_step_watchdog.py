"""A step or verb that does not end is named; the user's code in it is interrupted, or it is given up."""

import threading
import time

import pytest

from rollout_engine import SamplingParams
from rollout_engine.base.errors import StepDeadlineError
from rollout_engine.base.user_code import UserCode
from rollout_engine.engine.step_watchdog import StepWatchdog

LONG = 600.0
SHORT = 0.05
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)


@pytest.fixture
def watch():
    """Start watchdogs, which end with the test."""
    made = []

    def start(engine, give_up=lambda reason: None):
        made.append(StepWatchdog(engine.frontend.client.driver, LONG, give_up))
        return made[-1]

    yield start
    for watchdog in made:
        watchdog.end()


def in_second_step(engine, function):
    """Call `function` in the middle of the second step."""
    num_steps = iter(range(1_000))
    engine.executor.before_step = lambda: function() if next(num_steps) == 1 else None


def test_code_that_loops_is_interrupted_and_the_engine_goes_on(make_engine, drain, watch):
    engine = make_engine()
    watchdog = watch(engine)

    def loop():
        with UserCode(lambda: "logits processor m:P (apply, sequence 0)"):
            try:
                watchdog.seconds = SHORT
                while True:
                    time.sleep(0.001)
            finally:
                watchdog.seconds = LONG

    in_second_step(engine, loop)
    engine.add_request("a", [5, 6], PARAMS)
    last = drain(engine)[-1].outputs[0]
    assert last.finish_reason == "error"
    assert "m:P (apply, sequence 0) did not return within step_deadline=0.05 s" in last.error
    engine.add_request("b", [5, 6], PARAMS)
    assert drain(engine)[-1].outputs[0].finish_reason == "length"
    assert engine.check_health().stuck == ""


@pytest.mark.parametrize("is_users", [True, False])
def test_what_cannot_be_interrupted_is_given_up_and_named(make_engine, drain, watch, caplog, is_users):
    engine, reasons, told = make_engine(), [], threading.Event()
    watchdog = watch(engine, lambda reason: (reasons.append(reason), told.set()))

    def wait():
        watchdog.seconds = SHORT
        try:
            told.wait(60)
        finally:
            watchdog.seconds = LONG

    def wait_in_users_code():
        try:
            with UserCode(lambda: "method 'm' of worker extension m:E"):
                wait()
        except Exception:
            pass

    in_second_step(engine, wait_in_users_code if is_users else wait)
    engine.add_request("a", [5, 6], PARAMS)
    thread = threading.Thread(target=drain, args=(engine,))
    thread.start()
    assert told.wait(60)
    assert engine.check_health().stuck in ("", reasons[0])
    thread.join(60)
    assert len(reasons) == 1 and "not ended within step_deadline=0.05 s; it is at " in reasons[0]
    assert reasons[0].startswith("method 'm' of worker extension m:E, in a step" if is_users else "a step has")
    assert "told.wait(60)" in caplog.text


def test_health_names_what_is_stuck_while_it_is(make_engine, drain, watch):
    engine, go_on = make_engine(), threading.Event()
    watchdog = watch(engine)

    def wait():
        watchdog.seconds = SHORT
        go_on.wait(60)
        watchdog.seconds = LONG

    in_second_step(engine, wait)
    engine.add_request("a", [5, 6], PARAMS)
    thread = threading.Thread(target=drain, args=(engine,))
    thread.start()
    deadline = time.monotonic() + 60
    while not engine.check_health().stuck.startswith("a step has not ended") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.check_health().stuck.startswith("a step has not ended")
    go_on.set()
    thread.join(60)
    while engine.check_health().stuck and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.check_health().stuck == ""


def test_a_watchdog_ends_with_its_engine(make_engine, watch):
    watchdog = watch(make_engine())
    watchdog._driver = lambda: None
    watchdog._thread.join(60)
    assert not watchdog._thread.is_alive()


def commit(engine, function):
    """Call `function` on another thread where an update commits; returns the thread, which is about to begin."""

    def run():
        with engine.frontend.client.driver.boundary():
            function()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_code_that_loops_in_a_commit_is_interrupted_and_named(make_engine, watch):
    engine, errors = make_engine(), []
    watchdog = watch(engine)

    def loop():
        try:
            with UserCode(lambda: "hook m:load of module M"):
                watchdog.seconds = SHORT
                while True:
                    time.sleep(0.001)
        except StepDeadlineError as error:
            errors.append(str(error))
        finally:
            watchdog.seconds = LONG

    commit(engine, loop).join(60)
    assert errors == ["hook m:load of module M did not return within step_deadline=0.05 s and was interrupted"]


def test_a_commit_that_does_not_end_is_given_up_and_named(make_engine, watch):
    engine, reasons, told = make_engine(), [], threading.Event()
    watchdog = watch(engine, lambda reason: (reasons.append(reason), told.set()))

    def wait():
        watchdog.seconds = SHORT
        told.wait(60)
        watchdog.seconds = LONG

    commit(engine, wait).join(60)
    assert len(reasons) == 1
    assert reasons[0].startswith("the commit of a weight update has not ended within step_deadline=0.05 s; it is at ")


def test_a_commit_of_many_bytes_may_take_longer(make_engine, watch):
    engine, reasons, told = make_engine(), [], threading.Event()
    watchdog = watch(engine, lambda reason: (reasons.append(reason), told.set()))

    def wait(seconds):
        watchdog.seconds = SHORT
        told.wait(seconds)
        watchdog.seconds = LONG

    engine.executor.num_weight_bytes = 1 << 40
    commit(engine, lambda: wait(10 * SHORT)).join(60)
    assert not reasons, "a TiB was to be committed"
    engine.executor.num_weight_bytes = 16 << 20
    commit(engine, lambda: wait(60)).join(60)
    assert "step_deadline=0.05 s and 0.25 s for its size" in reasons[0]


def test_a_step_that_a_commit_waits_for_is_watched(make_engine, watch):
    engine, reasons, told = make_engine(), [], threading.Event()
    watchdog = watch(engine, lambda reason: (reasons.append(reason), told.set()))

    def wait():
        watchdog.seconds = SHORT
        told.wait(60)
        watchdog.seconds = LONG

    engine.core.quiesce = wait
    commit(engine, lambda: None).join(60)
    assert reasons[0].startswith("the step that a weight update waits for has not ended within")
