"""Verbs that run in pieces: steps between two of them, clients in turn, and an end whatever happens."""

import math
import threading
import time
from collections.abc import Generator

import pytest

from rollout_engine.base.errors import LifecycleError, RPCTimeoutError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.engine.calls import Call
from rollout_engine.engine.driver import EngineDriver
from rollout_engine.engine.local_client import LocalClient
from rollout_engine.engine.verb_table import VerbTable

TABLE, EVENTS = VerbTable(), []
LONG = SamplingParams(max_tokens=60, ignore_eos=True)


@TABLE.add_in_pieces(timeout="timeout", late=lambda arguments, begun: RPCTimeoutError("too late"))
def count(driver: EngineDriver, number: int, fails_at: int = -1, timeout: float = 60.0) -> Generator[None, None, int]:
    """Yield `number` times, and return it."""
    try:
        for i in range(number):
            if i == fails_at:
                raise ValueError(f"piece {i}")
            EVENTS.append(driver.caller)
            yield
        return number
    finally:
        EVENTS.append("end")


@pytest.fixture(autouse=True)
def no_events():
    EVENTS.clear()


@pytest.fixture
def driver(engine):
    driver = engine.frontend.client.driver
    engine.executor.before_step = lambda: EVENTS.append("step")
    return driver


def begin(driver, number, client=0, deadline=None, **arguments):
    call = Call(TABLE["count"], {"number": number} | arguments, caller=client, deadline=deadline)
    driver.run(call)
    return call.future


def test_a_step_comes_between_two_pieces_and_the_result_with_the_last(engine, driver, drain):
    engine.add_request("a", "hello", LONG)
    future = begin(driver, 5)
    assert EVENTS == [0] and not future.done()
    for _ in range(4):
        engine.step()
    assert EVENTS == [0, *["step", 0] * 4] and not future.done()
    engine.step()
    assert EVENTS[-2:] == ["step", "end"] and future.result(timeout=0) == 5
    drain(engine)


def test_pieces_run_though_there_is_nothing_to_step(engine, driver):
    future = begin(driver, 5)
    while driver.can_progress():
        driver.turn()
    assert future.result(timeout=0) == 5 and "step" not in EVENTS


def test_clients_have_turns_however_many_calls_one_has(driver):
    futures = [begin(driver, 9, client=1) for _ in range(5)] + [begin(driver, 9, client=2)]
    EVENTS.clear()
    while not futures[-1].done():
        driver.turn()
    assert EVENTS[:16] == [1, 2] * 8
    while driver.can_progress():
        driver.turn()
    assert [future.result(timeout=0) for future in futures] == [9] * 6


def test_what_a_piece_raises_is_the_error_of_its_call_alone(driver):
    failing, fine = begin(driver, 9, fails_at=3), begin(driver, 9)
    while driver.can_progress():
        driver.turn()
    with pytest.raises(ValueError, match="piece 3"):
        failing.result(timeout=0)
    assert fine.result(timeout=0) == 9


def test_a_call_whose_caller_has_gone_ends_at_the_next_piece(driver):
    future = begin(driver, 1000)
    driver.turn()
    future.cancel()
    driver.turn()
    assert EVENTS == [0, 0, "end"] and not driver.can_progress()


def test_a_call_ends_at_its_deadline(driver):
    future = begin(driver, 1000, deadline=time.monotonic() + 3600)
    assert not future.done()
    late = begin(driver, 1000, deadline=-math.inf)
    assert late.done(), "it does not begin"
    call = Call(TABLE["count"], {"number": 1000}, deadline=time.monotonic() + 3600)
    driver.run(call)
    call.deadline = -math.inf
    while not call.future.done():
        driver.turn()
    with pytest.raises(RPCTimeoutError):
        call.future.result(timeout=0)
    assert not future.done()
    future.cancel()
    driver.turn()


def test_a_commit_waits_for_calls_that_have_begun_and_steps_go_on_meanwhile(engine, driver, drain):
    engine.add_request("a", "hello", LONG)
    future = begin(driver, 5)
    with driver.boundary():
        assert future.result(timeout=0) == 5
        assert EVENTS == [0, *["step", 0] * 4, "step", "end"]
    drain(engine)


def test_scores_and_requests_share_the_steps_of_an_engine(engine, driver, drain):
    expected = engine.score([[5]] * 20, [[6, 7]] * 20)
    num_steps = engine.stats.num_steps
    engine.add_request("a", "hello", LONG)
    scores = engine.score([[5]] * 20, [[6, 7]] * 20)
    assert [list(score) for score in scores] == [list(score) for score in expected]
    assert engine.stats.num_steps - num_steps == 19
    drain(engine)


def test_a_sleep_ends_a_score_with_an_error(engine, driver):
    future = engine.frontend.client.call(
        "score", {"prompt_token_ids": [[5]] * 9, "completion_token_ids": [[6]] * 9, "temperature": 1.0}
    )
    engine.sleep()
    with pytest.raises(LifecycleError, match="score: not possible while the engine is ASLEEP"):
        future.result()
    engine.wake_up()


@pytest.mark.parametrize("own_thread", [False, True])
def test_shutdown_ends_calls_that_have_pieces_left(engine, own_thread):
    core, executor = engine.core, engine.executor
    client = LocalClient(core, executor, executor.info, own_thread=own_thread)
    held, go_on = threading.Event(), threading.Event()

    def score(*_):
        held.set()
        go_on.wait()
        yield {}
        while True:
            yield {}

    executor.score, raised = score, []
    arguments = {"prompt_token_ids": [[5]], "completion_token_ids": [[6]], "temperature": 1.0}

    def call():
        try:
            client.call("score", arguments).result()
        except LifecycleError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    held.wait()
    go_on.set()
    client.shutdown()
    thread.join()
    assert "shut down" in str(raised)
