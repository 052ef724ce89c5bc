"""Nobody waits for ever: a call that is late, cancelled or interrupted leaves nothing behind, over every client."""

import asyncio
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from rollout_engine import AsyncLLM
from rollout_engine.base.errors import CallTimeoutError, DrainTimeoutError, TransferTimeoutError
from rollout_engine.engine.local_client import LocalClient
from rollout_engine.engine.verbs import VERBS
from rollout_engine.process.process_client import ProcessClient
from tests.conformance.conftest import num_open_calls
from tests.conformance.running import in_flight, step_further, step_until, weights
from tests.conformance.scenarios import SCENARIOS

SCORE = {"prompt_token_ids": [[5]], "completion_token_ids": [[6]]}


def wait_until(condition):
    """Wait for something that another thread or process brings about."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        time.sleep(0.005)


def num_waiting(engine):
    """Calls that wait at the engine, in its own process."""
    return engine.collective_rpc("num_waiting_calls")[0]


def num_in_pieces(engine):
    """Calls with pieces left at the engine, in its own process."""
    return engine.collective_rpc("num_calls_in_pieces")[0]


def in_process(engine):
    return isinstance(engine.frontend.client, LocalClient)


def nobody_waits(engine):
    return num_open_calls(engine.frontend.client) == 0 and num_waiting(engine) == 0


def late_drain(engine):
    with in_flight(engine):
        for _ in range(20):
            with pytest.raises(DrainTimeoutError, match="after 0 seconds"):
                engine.wait_for_requests_to_drain(drain_timeout=0)
        step_until(engine, lambda: nobody_waits(engine))


def count(worker):
    pytest.fail("it ran after its caller was told that it would not")


def late_rpc(engine, tmp_path, method="count"):
    gate = tmp_path / "gate"
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(engine.collective_rpc, "hold", timeout=60, args=[str(gate)])
        wait_until((tmp_path / "gate.begun").exists)
        for _ in range(20):
            with pytest.raises(TimeoutError, match="count: no result within 0.01 s"):
                engine.collective_rpc(method, timeout=0.01)
        gate.touch()
        held.result(60)
    step_until(engine, lambda: nobody_waits(engine))


def late_pause(engine, _):
    with in_flight(engine):
        for _ in range(20):
            with pytest.raises(DrainTimeoutError, match="pause_generation: .*resume_generation.. calls that off"):
                engine.pause_generation(mode="wait", drain_timeout=0)
        step_until(engine, lambda: nobody_waits(engine))
        assert engine.is_paused()
        engine.resume_generation()
        step_further(engine)


def late_sleep(engine, _):
    with in_flight(engine):
        with pytest.raises(DrainTimeoutError, match="sleep: requests are still in flight after 0.05 seconds"):
            engine.sleep(mode="wait", drain_timeout=0.05)
        step_until(engine, lambda: nobody_waits(engine))
        assert not engine.is_sleeping()
    step_until(engine, engine.is_sleeping)
    engine.wake_up()


def late_score(engine, tmp_path, verb="score"):
    engine.collective_rpc("score_endlessly", args=[str(tmp_path / "moved")])
    with in_flight(engine):
        for seconds in (0, 0.05):
            with pytest.raises(CallTimeoutError, match=f"2 completions were not scored within {seconds:g} s"):
                getattr(engine, verb)([[5], [6]], [[7], [8]], timeout=seconds)
        step_until(engine, lambda: num_in_pieces(engine) == 0 and nobody_waits(engine))
    engine.collective_rpc("score_again")


def late_behind_another(engine, tmp_path, verb):
    """Call a verb behind a method that does not end. It does nothing, then or later; some need not wait."""
    client, gate = engine.frontend.client, tmp_path / "gate"
    if in_process(engine) and not VERBS[verb].crosses:
        before = []
        arguments = {"fn": before.append}
    else:
        before, arguments = [], SCENARIOS[verb].arguments
    if verb == "resume_generation":
        engine.pause_generation()
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(engine.collective_rpc, "hold", timeout=60, args=[str(gate)])
        wait_until((tmp_path / "gate.begun").exists)
        try:
            need_not_wait = VERBS[verb].when == "at once" or (VERBS[verb].when == "any time" and in_process(engine))
            bound = VERBS[verb].bind((), {**arguments, "timeout": 30 if need_not_wait else 0.05})
            for _ in range(2):
                if need_not_wait:
                    client.call(verb, bound).wait(VERBS[verb], bound)
                    continue
                with pytest.raises(CallTimeoutError, match=f"^{verb}: no result within 0.05 s; .*check_health"):
                    client.call(verb, bound).wait(VERBS[verb], bound)
        finally:
            gate.touch()
        held.result(60)
    step_until(engine, lambda: nobody_waits(engine))
    assert not before, "it ran after its caller was told that it would not"
    assert engine.is_paused() == (verb == "resume_generation")
    engine.resume_generation()


LATE = {
    "wait_for_requests_to_drain": lambda engine, _: late_drain(engine),
    "pause_generation": late_pause,
    "sleep": late_sleep,
    "collective_rpc": late_rpc,
    "call_function": partial(late_rpc, method=count),
    "score": late_score,
    "score_candidates": partial(late_score, verb="score_candidates"),
}
"""By the name of the verb: calls that are late, and leave nobody waiting. Others are late behind what does not end."""


@pytest.mark.quick(2)
@pytest.mark.parametrize("verb", VERBS)
def test_a_call_that_is_late_leaves_nobody_waiting(engine, tmp_path, verb):
    if not VERBS[verb].crosses and not in_process(engine):
        pytest.skip("it does not cross processes")
    LATE.get(verb, partial(late_behind_another, verb=verb))(engine, tmp_path)


def test_an_update_behind_what_does_not_end_is_late(engine, tmp_path):
    if not in_process(engine):
        pytest.skip("the engine's process is given ten seconds more")
    gate, version = tmp_path / "gate", engine.policy_version
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(engine.collective_rpc, "hold", timeout=60, args=[str(gate)])
        wait_until((tmp_path / "gate.begun").exists)
        with pytest.raises(TransferTimeoutError, match="could not begin in the time given: .* is busy with hold"):
            engine.update_weights(weights(1), timeout=0.05)
        gate.touch()
        held.result(60)
    assert engine.policy_version == version and nobody_waits(engine)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "verb, arguments", [("wait_for_requests_to_drain", {"drain_timeout": 300}), ("pause_generation", {"mode": "wait"})]
)
def test_cancelled_calls_leave_nobody_waiting(engine, verb, arguments):
    with in_flight(engine):
        calls = [engine.frontend.client.call(verb, arguments) for _ in range(200)]
        step_until(engine, lambda: num_waiting(engine) == 200)
        assert all(call.cancel() for call in calls)
        step_until(engine, lambda: nobody_waits(engine))
        engine.resume_generation()
        step_further(engine)


@pytest.fixture
def endless_scores(engine, tmp_path):
    """Scores compute pieces until they are taken back; the file exists once another thread computes some."""
    moved = tmp_path / "moved"
    engine.collective_rpc("score_endlessly", args=[str(moved)])
    yield moved
    engine.collective_rpc("score_again")


def test_a_score_that_is_cancelled_computes_no_more_pieces(engine, endless_scores):
    with in_flight(engine):
        calls = [engine.frontend.client.call("score", SCORE) for _ in range(20)]
        step_until(engine, lambda: num_in_pieces(engine) == 20)
        step_further(engine)
        assert all(call.cancel() for call in calls)
        step_until(engine, lambda: num_in_pieces(engine) == 0 and nobody_waits(engine))
        step_further(engine)


def test_a_commit_does_not_wait_for_a_score_that_is_cancelled(engine, endless_scores):
    score = engine.frontend.client.call("score", SCORE)
    with ThreadPoolExecutor(1) as pool:
        updated = pool.submit(engine.update_weights, weights(0))
        wait_until(endless_scores.exists)  # the commit has begun, and waits for the last piece
        assert score.cancel()
        updated.result(60)
    assert num_in_pieces(engine) == 0


def test_a_commit_does_not_wait_for_the_score_of_a_client_that_has_left(engine, endless_scores):
    if not isinstance(engine.frontend.client, ProcessClient):
        pytest.skip("nobody can connect to it")
    leaver = ProcessClient.connect(engine.frontend.client.address)
    leaver.call("score", SCORE)
    step_until(engine, lambda: num_in_pieces(engine) == 1)
    with ThreadPoolExecutor(1) as pool:
        updated = pool.submit(engine.update_weights, weights(0))
        wait_until(endless_scores.exists)
        leaver.shutdown()
        updated.result(60)
    assert num_in_pieces(engine) == 0


def test_a_call_that_is_cancelled_before_it_begins_never_does(engine, tmp_path):
    client, gate = engine.frontend.client, tmp_path / "gate"
    (before,) = engine.collective_rpc("count")
    hold = ("hold", 60, [str(gate)]) if in_process(engine) else ("hold_until_cancelled", 60, [20])
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(engine.collective_rpc, *hold)
        if in_process(engine):
            wait_until((tmp_path / "gate.begun").exists)
        else:
            wait_until(lambda: num_open_calls(client) == 1)
        count = VERBS["collective_rpc"].bind(("count", 60), {})
        calls = [client.call("collective_rpc", count) for _ in range(20)]
        assert all(call.cancel() for call in calls)
        gate.touch()
        held.result(60)
    assert engine.collective_rpc("count") == [before + 1 + in_process(engine)]  # holding counts, too
    assert nobody_waits(engine)


def test_an_interrupt_ends_a_blocking_verb_and_leaves_nobody_waiting(engine):
    """Ctrl-C, in the main thread."""
    main = threading.main_thread().ident
    if threading.get_ident() != main:
        pytest.skip("tests do not run in the main thread here")

    def interrupt():
        wait_until(lambda: num_open_calls(engine.frontend.client) == 1)
        signal.pthread_kill(main, signal.SIGINT)

    with in_flight(engine):
        for wait in (engine.wait_for_requests_to_drain, lambda: engine.pause_generation(mode="wait")):
            with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
                pool.submit(interrupt)
                wait()
            step_until(engine, lambda: nobody_waits(engine))
            engine.resume_generation()


def test_a_task_that_is_cancelled_leaves_nobody_waiting(engine):
    if engine.frontend.client.needs_turns:
        pytest.skip("coroutines need an engine that computes by itself")
    face = AsyncLLM._standing_on(engine.frontend)

    async def give_up():
        for verb in (face.wait_for_requests_to_drain, lambda: face.pause_generation(mode="wait")):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(verb(), 0.05)

    async def give_up_often():
        await asyncio.gather(*(give_up() for _ in range(100)))

    with in_flight(engine):
        asyncio.run(give_up_often())
        step_until(engine, lambda: nobody_waits(engine))
        engine.resume_generation()


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_the_calls_of_a_closed_loop_leave_nobody_waiting(engine):
    if engine.frontend.client.needs_turns:
        pytest.skip("coroutines need an engine that computes by itself")
    face, loop = AsyncLLM._standing_on(engine.frontend), asyncio.new_event_loop()
    with in_flight(engine):
        tasks = [face.wait_for_requests_to_drain() for _ in range(50)]
        for task in tasks:
            loop.run_until_complete(_begin(task))
        loop.close()
        for task in tasks:
            task.close()
        step_until(engine, lambda: nobody_waits(engine))


async def _begin(coroutine):
    """Run a coroutine up to the place where it waits."""
    coroutine.send(None)


def test_what_a_client_had_sent_does_not_begin_once_it_has_left(engine, tmp_path):
    client, begun = engine.frontend.client, tmp_path / "begun"
    if not isinstance(engine.frontend.client, ProcessClient):
        pytest.skip("nobody can connect to it")
    (before,) = engine.collective_rpc("count")
    leaver = ProcessClient.connect(client.address)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(engine.collective_rpc, "hold_until_left", 60, [str(begun)])
        wait_until(begun.exists)
        for _ in range(20):
            leaver.call("collective_rpc", VERBS["collective_rpc"].bind(("count",), {}))
        leaver.shutdown()
        held.result(60)
    assert engine.collective_rpc("count") == [before + 1]
