"""Every verb does the same over every client: its scenario, its errors, its deadlines, its place in the order."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from rollout_engine.base.errors import (
    DrainTimeoutError,
    LifecycleError,
    RequestError,
    RPCError,
    RPCTimeoutError,
)
from rollout_engine.engine.verbs import VERBS
from tests.conformance.conftest import num_open_calls
from tests.conformance.running import ENDLESS, SHORT, ended, in_flight, last_of, step_further, step_until
from tests.conformance.scenarios import SCENARIOS, call

WRONG = [object(), b"no argument is bytes"]


def test_every_verb_has_a_scenario_and_every_scenario_is_a_verbs():
    assert set(SCENARIOS) == set(VERBS)


@pytest.mark.quick(7)
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_does_the_same_over_every_client(engine, same, verb):
    same(SCENARIOS[verb].play(engine))


@pytest.mark.quick(18)
@pytest.mark.parametrize("verb", [name for name, verb in VERBS.items() if verb.crosses])
def test_an_argument_of_another_type_is_refused_by_the_name_of_its_verb(engine, verb):
    needed = SCENARIOS[verb].arguments
    complete = {name: p.default for name, p in VERBS[verb].signature.parameters.items()} | needed
    wrong = [{**complete, name: value} for name in complete for value in WRONG]
    for arguments in [*wrong, {**complete, "nonsense": 1}]:
        with pytest.raises((RequestError, RPCError), match=verb):
            call(engine, verb, **arguments)


@pytest.mark.quick(18)
@pytest.mark.parametrize("verb", [name for name, verb in VERBS.items() if verb.public])
def test_an_argument_that_no_method_has_is_refused_with_the_nearest(engine, verb):
    nearest = "Did you mean 'timeout'" if "timeout" in VERBS[verb].signature.parameters else "Known: "
    with pytest.raises(RequestError, match=f"Unknown argument of {verb} 'timeuot'. {nearest}"):
        getattr(engine, verb)(**SCENARIOS[verb].arguments, timeuot=1)
    with pytest.raises(RequestError, match=f"Unknown argument of {verb} 'nonsense'"):
        getattr(engine, verb)(**SCENARIOS[verb].arguments, nonsense=1)


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, 0.0, float("inf"), "soon", 1e300])
def test_a_deadline_is_a_number_of_seconds(engine, same, seconds):
    outcomes = []
    for wait in (
        lambda: engine.wait_for_requests_to_drain(seconds),
        lambda: engine.collective_rpc("get_weight_digest", seconds),
    ):
        try:
            outcomes.append(wait())
        except (RequestError, RPCError) as error:
            outcomes.append((type(error).__name__, str(error)))
    same(outcomes)


def test_a_drain_that_takes_too_long_leaves_nothing_behind(engine):
    with in_flight(engine):
        with pytest.raises(DrainTimeoutError, match="still in flight after 0.05 seconds; they go on"):
            engine.wait_for_requests_to_drain(drain_timeout=0.05)
        step_further(engine, 10)  # they do
        step_until(engine, lambda: num_open_calls(engine.frontend.client) == 0)


def test_a_drain_ends_with_the_abort_of_what_it_waits_for(engine):
    with in_flight(engine) as request_id, ThreadPoolExecutor(1) as pool:
        drained = pool.submit(engine.wait_for_requests_to_drain)
        step_further(engine)
        assert not drained.done()
        engine.abort_request(request_id)
        drained.result(60)
        assert ended(engine).finish_reason == "abort"


def test_a_drain_ends_with_the_pause_that_freezes_what_it_waits_for(engine):
    with in_flight(engine), ThreadPoolExecutor(1) as pool:
        drained = pool.submit(engine.wait_for_requests_to_drain)
        step_further(engine)
        engine.pause_generation(mode="keep")
        with pytest.raises(LifecycleError, match="wait_for_requests_to_drain: 1 requests are frozen"):
            drained.result(60)
        engine.resume_generation()


def test_a_pause_that_waits_is_called_off_by_a_resume(engine):
    with in_flight(engine), ThreadPoolExecutor(1) as pool:
        paused = pool.submit(engine.pause_generation, mode="wait")
        step_until(engine, engine.is_paused)
        engine.resume_generation()
        paused.result(60)
        step_further(engine)


@pytest.mark.quick(1)
def test_a_slow_call_is_late_and_goes_on_while_one_that_has_not_begun_never_will(engine, tmp_path):
    gate = tmp_path / "gate"
    (before,) = engine.collective_rpc("count")
    try:
        with pytest.raises(RPCTimeoutError, match="hold: no result within 0.2 s; if it has begun it goes on") as caught:
            engine.collective_rpc("hold", timeout=0.2, args=[str(gate)])
        with pytest.raises(RPCTimeoutError, match="count: no result within 0.2 s"):
            engine.collective_rpc("count", timeout=0.2)
    finally:
        gate.touch()
    assert caught.value.method == "hold"
    assert engine.collective_rpc("count", timeout=60) == [before + 2]  # that which was late, and this one


@pytest.mark.parametrize("end", [lambda e: e.pause_generation(), lambda e: e.sleep()], ids=["pause", "sleep"])
def test_outputs_of_an_abort_come_before_the_reply_of_the_verb_that_caused_it(engine, end):
    with in_flight(engine):
        end(engine)
        assert not engine.frontend.streams.has_live()
        assert ended(engine).finish_reason == "abort"
    engine.wake_up()
    engine.resume_generation()


def test_a_verb_sees_what_was_added_and_aborted_before_it(engine):
    engine.pause_generation()
    for count in range(1, 4):
        engine.add_request(str(count), "hello", ENDLESS)
        assert call(engine, "get_num_unfinished_requests") == engine.check_health().num_unfinished_requests == count
    engine.abort_request(["1", "2"])
    assert call(engine, "get_num_unfinished_requests") == 1
    outputs = step_until(engine, lambda: engine.get_num_unfinished_requests() == 1)
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 2
    engine.abort_request("3", discard=True)
    engine.resume_generation()


def test_calls_from_many_threads_are_all_answered(engine):
    verbs = ["is_paused", "get_model_metadata", "check_health", "reset_prefix_cache", "get_cache_usage"]
    with in_flight(engine), ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(getattr(engine, verb)) for verb in verbs * 8]
        step_further(engine)
        assert all(answer.result(60) is not None for answer in answers)
    last_of(engine, "hello", SHORT)


def test_every_face_says_which_kinds_of_requests_it_serves(engine, same):
    same(engine.get_supported_tasks())
    assert {"generate", "last", "mean", "token"} <= set(engine.get_supported_tasks())
    assert not engine.is_tracing_enabled()
