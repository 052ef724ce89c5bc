"""Pausing and sleeping through `LLMEngine` and `LLM`, alone and with several threads."""

import threading
import time
from types import SimpleNamespace

import pytest

from rollout_engine.base.errors import DirtyWeightsError, DrainTimeoutError, LifecycleError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.engine import calls, driver

LONG = SamplingParams(max_tokens=60, ignore_eos=True)
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


def run_in_thread(function, *arguments):
    """A started thread; its result or exception is `outcome[0]`."""
    outcome = []

    def run():
        try:
            outcome.append(function(*arguments))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def wait_for(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.001)


def slow_down(engine):
    """Every step after the sixth takes a second, until the event that is returned is set."""
    execute, hurry = engine.executor.execute, threading.Event()

    def slowly(work):
        hurry.wait(0.002 if engine.stats.num_steps < 6 else 1.0)
        return execute(work)

    engine.executor.execute = slowly
    return hurry


# Alone


def test_abort_returns_what_requests_have(engine, drain):
    engine.add_request("a", "hello", LONG)
    for _ in range(4):
        engine.step()
    engine.pause_generation()
    assert engine.is_paused() and engine.stats.pause_seconds.count == 1
    (output,) = drain(engine)
    assert (output.finished, output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == (True, "abort", 4)
    engine.resume_generation()
    assert not engine.is_paused()


@pytest.mark.parametrize("spelling", [dict(mode="wait"), dict(wait_for_inflight_requests=True)])
def test_wait_steps_by_itself_and_loses_no_result(engine, drain, spelling):
    engine.add_request("a", "hello", SamplingParams(max_tokens=30, ignore_eos=True, output_kind="delta"))
    engine.step()
    engine.pause_generation(**spelling)
    engine.add_request("late", "hello", SHORT)
    outputs = engine.step()
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 29
    assert engine.step() == [] and engine.is_unfinished("late")
    engine.resume_generation()
    assert drain(engine)[-1].request_id == "late"


def test_keep_freezes_and_goes_on_to_the_same_tokens(engine, drain):
    engine.add_request("whole", "hello", LONG)
    (whole,) = [output for output in drain(engine) if output.finished]
    engine.add_request("kept", "hello", SamplingParams(max_tokens=60, ignore_eos=True, seed=whole.outputs[0].seed))
    for _ in range(20):
        engine.step()
    engine.pause_generation(mode="keep")
    assert engine.step() == [] and engine.step() == []
    engine.resume_generation()
    assert drain(engine)[-1].outputs[0].token_ids == whole.outputs[0].token_ids


def test_pausing_measures_its_latency(engine, monkeypatch):
    clock = SimpleNamespace(perf_counter=lambda: 0.5 * engine.core.stats.num_steps, monotonic=time.monotonic)
    for module in (calls, driver):
        monkeypatch.setattr(module, "time", clock)
    engine.add_request("a", "hello", SHORT)
    engine.pause_generation(mode="wait")
    assert engine.stats.last_pause_seconds == 6 * 0.5
    engine.pause_generation(mode="keep")
    assert engine.stats.last_pause_seconds == 0.0
    assert (engine.stats.pause_seconds.count, engine.stats.pause_seconds.sum) == (2, 3.0)
    engine.step()


def test_an_interrupt_while_waiting_leaves_a_pause_that_is_complete(engine, drain):
    engine.add_request("a", "hello", LONG)
    engine.executor.interrupt_at_step = 5
    with pytest.raises(KeyboardInterrupt):
        engine.pause_generation(mode="wait")
    assert engine.is_paused() and not engine.core.lifecycle.draining
    engine.core.check_integrity()
    assert drain(engine)[-1].outputs[0].finish_reason == "error"


def test_draining_finishes_what_is_in_flight(engine):
    engine.add_request("a", "hello", LONG)
    engine.wait_for_requests_to_drain()
    assert engine.core.num_in_flight == 0
    assert engine.step()[-1].finished


def test_draining_in_too_little_time_is_a_timeout_and_the_requests_go_on(engine, drain):
    engine.add_request("a", "hello", LONG)
    with pytest.raises(DrainTimeoutError, match="requests are still in flight after 0 seconds") as error:
        engine.wait_for_requests_to_drain(drain_timeout=0)
    assert isinstance(error.value, TimeoutError)
    assert len(drain(engine)[-1].outputs[0].token_ids) == 60


def test_a_deadline_is_kept_while_another_thread_computes_a_step(engine, drain):
    engine.add_request("a", "hello", LONG)
    call = engine.frontend.client.call("wait_for_requests_to_drain", {"drain_timeout": 300.0})
    begun, gate = threading.Event(), threading.Event()
    engine.executor.before_step = lambda: (begun.set(), gate.wait(60))
    thread, outcome = run_in_thread(engine.step)
    begun.wait()
    with pytest.raises(TimeoutError):
        call.result(0.1)
    assert not outcome
    call.cancel()
    gate.set()
    thread.join()
    drain(engine)


def test_a_drain_ends_no_sooner_than_a_sleep_that_waits_for_the_same_requests(make_engine, drain):
    engine = make_engine(async_scheduling=True)
    engine.add_request("a", "hello", SHORT)
    slept = engine.frontend.client.call("sleep", {"mode": "wait"})
    drained = engine.frontend.client.call("wait_for_requests_to_drain", {})
    while engine.core.num_in_flight:
        engine.step()
        engine.reset_prefix_cache()  # waits for the step in flight, which is to be the last
    assert not slept.done() and not drained.done(), "the last outputs are not returned yet"
    assert drain(engine)[-1].finished
    assert slept.result(0) is None and drained.result(0) is None
    engine.wake_up()


def test_draining_frozen_requests_is_refused_at_once(engine):
    engine.add_request("a", "hello", LONG)
    engine.pause_generation(mode="keep")
    with pytest.raises(LifecycleError, match=r"1 requests are frozen while the engine is PAUSED\(keep\)"):
        engine.wait_for_requests_to_drain()
    engine.abort_request("a", discard=True)
    engine.wait_for_requests_to_drain()


def test_generate_that_would_wait_for_ever_is_refused(make_llm):
    llm = make_llm()
    llm.pause_generation(mode="keep")
    with pytest.raises(LifecycleError, match=r"generate: .* PAUSED\(keep\): .*; call resume_generation\(\) first"):
        llm.generate("hello", SHORT, use_tqdm=False)
    llm.resume_generation()
    llm.sleep()
    with pytest.raises(LifecycleError, match=r"generate: .* ASLEEP.*; call wake_up\(\) first"):
        llm.generate("hello", SHORT, use_tqdm=False)
    assert llm.is_sleeping()
    llm.wake_up()
    assert not llm.is_sleeping()
    assert len(llm.generate("hello", SHORT, use_tqdm=False)) == 1


def test_weights_that_are_asleep_or_dirty_are_not_computed_with(make_llm):
    llm = make_llm()
    llm.sleep(level=2)
    with pytest.raises(LifecycleError, match="score: .*the weights are not resident"):
        llm.score([[5]], [[6]])
    with pytest.raises(LifecycleError, match=r"update_weights: .* call wake_up\(\['weights'\]\) first"):
        llm.update_weights({})
    llm.wake_up()
    for call in (lambda: llm.generate("hello", SHORT), lambda: llm.score([[5]], [[6]])):
        with pytest.raises(DirtyWeightsError, match="Send a complete update first"):
            call()


def test_a_step_over_dirty_weights_says_that_an_update_is_missing(engine):
    engine.add_request("a", "hello", LONG)
    engine.step()
    engine.sleep(level=2, mode="keep")
    assert engine.step() == []
    engine.wake_up()
    with pytest.raises(DirtyWeightsError, match="step: the live weights are incomplete"):
        engine.step()
    engine.abort_request("a")
    assert engine.step()[0].outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("ends_well", [True, False])
def test_requests_that_come_while_weights_are_overwritten_wait_for_the_end(engine, drain, ends_well):
    engine.core.begin_update()
    engine.core.lifecycle.stop_for_update()
    engine.frontend.require_running("generate")
    engine.add_request("a", "hello", SHORT)
    assert engine.step() == []
    engine.core.end_update(dirty=not ends_well)
    if not ends_well:
        with pytest.raises(DirtyWeightsError, match="step: the live weights are incomplete"):
            engine.step()
        engine.core.begin_update()
        engine.core.end_update(dirty=False)
    drain(engine)
    assert not engine.has_unfinished_requests()


def test_reset_says_whether_it_was_done(engine, drain):
    engine.add_request("a", "hello there, hello there", LONG)
    engine.step()
    assert engine.reset_prefix_cache() is False
    assert engine.reset_prefix_cache(reset_running_requests=True) is True
    drain(engine)
    assert engine.reset_prefix_cache() is True


def test_every_verb_after_shutdown_says_so(make_engine):
    engine = make_engine()
    engine.shutdown()
    verbs = "pause_generation resume_generation is_paused sleep wake_up is_sleeping reset_prefix_cache"
    for verb in (*verbs.split(), "wait_for_requests_to_drain"):
        with pytest.raises(LifecycleError, match=f"{verb}: .* the engine is DEAD: it was shut down; make a new engine"):
            getattr(engine, verb)()


# Several threads


def test_a_generate_in_progress_waits_for_another_thread_to_resume(make_llm):
    llm = make_llm()
    hurry = slow_down(llm.llm_engine)
    thread, outcome = run_in_thread(lambda: llm.generate("hello", LONG, use_tqdm=False))
    wait_for(lambda: llm.llm_engine.stats.num_steps > 5)
    llm.pause_generation(mode="keep")
    num_steps = llm.llm_engine.stats.num_steps
    time.sleep(0.2)
    assert thread.is_alive() and llm.llm_engine.stats.num_steps == num_steps
    hurry.set()
    llm.resume_generation()
    thread.join(300)
    assert len(outcome[0][0].outputs[0].token_ids) == 60


def test_a_generate_in_progress_returns_what_it_has_when_another_thread_aborts(make_llm):
    llm = make_llm()
    slow_down(llm.llm_engine)
    thread, outcome = run_in_thread(lambda: llm.generate(["hello", "you"], LONG, use_tqdm=False))
    wait_for(lambda: llm.llm_engine.stats.num_steps > 5)
    llm.pause_generation(mode="abort")
    thread.join(300)
    assert [output.outputs[0].finish_reason for output in outcome[0]] == ["abort"] * 2
    assert all(5 <= len(output.outputs[0].token_ids) < 60 for output in outcome[0])


def test_pausing_in_mode_wait_lets_another_thread_go_on_stepping(make_llm):
    llm = make_llm()
    hurry = slow_down(llm.llm_engine)
    thread, outcome = run_in_thread(lambda: llm.generate("hello", LONG, use_tqdm=False))
    wait_for(lambda: llm.llm_engine.stats.num_steps > 5)
    hurry.set()
    llm.pause_generation(mode="wait")
    assert llm.is_paused()
    thread.join(300)
    assert len(outcome[0][0].outputs[0].token_ids) == 60


def test_a_wait_ends_when_another_thread_resumes(engine, drain):
    hurry = slow_down(engine)
    engine.add_request("a", "hello", LONG)
    thread, _ = run_in_thread(lambda: engine.pause_generation(mode="wait"))
    wait_for(lambda: engine.core.lifecycle.draining)
    engine.resume_generation()
    hurry.set()
    thread.join(300)
    assert not thread.is_alive() and not engine.is_paused()
    drain(engine)


def test_a_generate_that_waits_for_a_resume_can_be_aborted(make_llm):
    llm = make_llm()
    slow_down(llm.llm_engine)
    thread, outcome = run_in_thread(lambda: llm.generate("hello", LONG, use_tqdm=False))
    wait_for(lambda: llm.llm_engine.stats.num_steps > 5)
    llm.pause_generation(mode="keep")
    llm.llm_engine.abort_request("request-1")
    thread.join(300)
    assert outcome[0][0].outputs[0].finish_reason == "abort"


def test_a_pause_from_another_thread_goes_before_the_next_step(engine, drain, monkeypatch):
    monkeypatch.setattr(driver, "_GIVE_WAY_SECONDS", 60.0)
    engine.add_request("a", [5] * 4, SamplingParams(max_tokens=8, ignore_eos=True))
    pausing = threading.Thread(target=engine.pause_generation, kwargs={"mode": "keep"})
    execute = engine.executor.execute

    def ask_for_a_pause(work):
        pausing.start()
        while engine.frontend.client.driver._entered.is_set():
            time.sleep(0.001)
        return execute(work)

    monkeypatch.setattr(engine.executor, "execute", ask_for_a_pause)
    engine.step()
    monkeypatch.setattr(engine.executor, "execute", execute)
    engine.step()
    assert engine.core.stats.num_steps == 1
    pausing.join()
    engine.resume_generation()
    drain(engine)
