"""What breaks half-way ends, over every client: an update that fails at any step, a call for which no thread starts."""

import asyncio
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from rollout_engine import AsyncLLM
from rollout_engine.base.errors import RetryableError
from rollout_engine.engine.local_client import LocalClient
from rollout_engine.process.process_client import ProcessClient
from sync import make_sender
from tests.conformance.clients import started
from tests.conformance.running import SHORT, bring_back, in_flight, last_of, step_further, step_until, weights
from tests.conformance.test_waits import in_process, wait_until
from tests.integration.sample_extensions import NoSocketThread, refuse_thread


@pytest.fixture
def engine(engine):
    """It has the checkpoint's weights again for the next test."""
    yield engine
    bring_back(engine)
    engine.update_weights(weights(0))


def state(engine):
    return engine.get_metrics().core.state


def offered(engine):
    """The manifest of an update that is carried out call by call."""
    with make_sender_of(engine) as manifest:
        return manifest


@contextmanager
def make_sender_of(engine):
    sender = make_sender("inproc")
    try:
        yield sender.offer(weights(1), engine.policy_version + 1, engine.get_model_metadata())
    finally:
        sender.close()


STEPS = (
    ("driver", "boundary"),
    ("core", "begin_update"),
    ("core", "close_for_update"),
    ("updater", "begin"),
    ("updater", "receive"),
    ("updater", "verify"),
    ("updater", "commit"),
    ("core", "commit_version"),
    ("updater", "confirm"),
)


@pytest.mark.quick(1)
@pytest.mark.parametrize("where, method", STEPS)
def test_an_update_that_fails_at_any_step_ends(engine, some_of, where, method):
    version = engine.policy_version
    for error in ("RuntimeError", "MemoryError", "KeyboardInterrupt", "RuntimeError")[: some_of(4)]:
        engine.collective_rpc("break_update", args=[where, method, error])
        with pytest.raises(BaseException, match="injected"):
            engine.update_weights(weights(1), mode="abort")
        assert state(engine) in ("RUNNING", "DIRTY")
        report = engine.update_weights(weights(1), reset_version=True, version=version)
        assert state(engine) == "RUNNING" and report.version == version
        last_of(engine, "hello", SHORT)
        engine.update_weights(weights(0), reset_version=True, version=version)


@pytest.mark.quick(1)
@pytest.mark.parametrize("where, method", [("core", "begin_update"), ("updater", "begin")])
def test_an_update_by_calls_that_cannot_begin_leaves_none_open(engine, where, method):
    for error in ("RuntimeError", "MemoryError", "KeyboardInterrupt"):
        engine.collective_rpc("break_update", args=[where, method, error])
        with pytest.raises(BaseException, match="injected"):
            engine.collective_rpc("begin_weight_update", args=[offered(engine)])
        assert state(engine) == "RUNNING"
        assert engine.collective_rpc("begin_weight_update", args=[offered(engine)]) == [True]
        engine.collective_rpc("abort_weight_update")


def test_an_interrupted_update_ends_on_both_sides(engine):
    main = threading.main_thread().ident
    if threading.get_ident() != main:
        pytest.skip("tests do not run in the main thread here")

    def interrupt():
        wait_until(lambda: engine.collective_rpc("waits_for_requests") == [True])
        signal.pthread_kill(main, signal.SIGINT)

    with in_flight(engine):
        with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
            pool.submit(interrupt)
            engine.update_weights(weights(1), mode="wait")
        step_until(engine, lambda: state(engine) == "RUNNING")
        step_further(engine)


def test_an_update_whose_task_is_cancelled_ends_on_both_sides(engine):
    if engine.frontend.client.needs_turns:
        pytest.skip("coroutines need an engine that computes by itself")
    face, version = AsyncLLM._standing_on(engine.frontend), engine.policy_version

    async def give_up():
        update = asyncio.create_task(face.update_weights(weights(1), mode="wait"))
        while await face.collective_rpc("waits_for_requests") != [True]:
            assert not update.done()
            await asyncio.sleep(0.005)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update

    with in_flight(engine):
        asyncio.run(give_up())
        step_until(engine, lambda: state(engine) == "RUNNING")
        step_further(engine)
    assert engine.check_health().policy_version == version


def test_a_call_that_finds_no_thread_fails_alone(engine):
    version, begun = engine.policy_version, offered(engine)
    engine.collective_rpc("refuse_threads", args=[True])
    try:
        needs_one = [
            lambda: engine.collective_rpc("begin_weight_update", args=[begun]),
            (lambda: engine.collective_rpc("count", timeout=60))
            if in_process(engine)
            else (lambda: engine.update_weights(weights(1))),
        ]
        for call in needs_one:
            with pytest.raises(RetryableError, match="cannot start .*can't start new thread.*ulimit -u"):
                call()
        last_of(engine, "hello", SHORT)
        assert (state(engine), engine.policy_version) == ("RUNNING", version)
        if not in_process(engine):  # the core needs one for what a client leaves behind
            with started(ProcessClient.connect, engine.frontend.client.address):
                pass
            last_of(engine, "hello", SHORT)
    finally:
        engine.collective_rpc("refuse_threads", args=[False])
    assert engine.update_weights(weights(1)).version == version + 1


def test_a_coroutine_that_finds_no_thread_fails_and_does_nothing_later(engine, monkeypatch):
    if engine.frontend.client.needs_turns:
        pytest.skip("coroutines need an engine that computes by itself")
    face, version = AsyncLLM._standing_on(engine.frontend), engine.policy_version

    async def update():
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse_thread)
            with pytest.raises(RetryableError, match="'update_weights' cannot start"):
                await face.update_weights(weights(1))
        await face.get_metrics()

    asyncio.run(update())
    assert engine.check_health().policy_version == version


@pytest.mark.slow
@pytest.mark.parametrize(
    "start, name",
    [
        (lambda config: LocalClient.start(config, own_thread=True), "engine"),
        (ProcessClient.start, "core-client"),
    ],
)
def test_a_client_that_finds_no_thread_leaves_nothing_behind(config, monkeypatch, start, name):
    before, launch = set(threading.enumerate()), threading.Thread.start
    monkeypatch.setattr(
        threading.Thread, "start", lambda each: refuse_thread(each) if each.name == name else launch(each)
    )
    with pytest.raises(RetryableError, match=f"'{name}' cannot start"):
        start(config)
    assert set(threading.enumerate()) <= before


@pytest.mark.slow
def test_a_core_that_finds_no_thread_says_so(config):
    with pytest.raises(RetryableError, match="'core-socket' cannot start"):
        ProcessClient.start(type(config)(model=config.model, num_threads=1, worker_extensions=[NoSocketThread]))
