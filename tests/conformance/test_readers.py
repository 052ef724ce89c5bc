"""Requests whose readers are gone end and are forgotten, over every client: thousands of them leave no table longer."""

import asyncio
import gc

import pytest

from rollout_engine import AsyncLLM, LLMEngine, RolloutPolicy, SamplingParams
from rollout_engine.base.errors import LifecycleError
from tests.conformance.running import ENDLESS, last_of, step_further, step_until
from tests.unit.results.test_open_streams import tables_of

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)
STREAMED = SamplingParams(max_tokens=30_000, ignore_eos=True, detokenize=False)


@pytest.fixture
def face(engine):
    """An asynchronous face of the client."""
    if engine.frontend.client.needs_turns:
        pytest.skip("coroutines need an engine that computes by itself")
    return AsyncLLM._standing_on(engine.frontend)


def assert_forgotten(engine):
    """Nothing is kept of any request, at the client or at the core."""
    gc.collect()
    step_until(engine, lambda: engine.check_health().num_unfinished_requests == len(engine.frontend.streams) == 0)
    step_until(engine, lambda: tables_of(engine.frontend.streams) == [0] * 5)


def first_output(loop, generator):
    return loop.run_until_complete(anext(generator))


async def firsts(generators):
    return await asyncio.gather(*(anext(generator) for generator in generators))


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("order", ["dropped first", "closed first"])
def test_generators_of_closed_loops_are_aborted_and_forgotten(engine, face, order):
    for _ in range(5):
        loop = asyncio.new_event_loop()
        generators = [face.generate("hello", STREAMED) for _ in range(60)]
        loop.run_until_complete(firsts(generators))
        if order == "dropped first":
            del generators
        loop.close()
        generators = loop = None
    assert_forgotten(engine)


def test_a_generator_that_is_kept_past_its_loop_says_so(engine, face):
    loop = asyncio.new_event_loop()
    generator = face.generate("hello", STREAMED)
    first_output(loop, generator)
    loop.close()
    step_until(engine, lambda: engine.check_health().num_unfinished_requests == 0)
    assert len(engine.frontend.streams) == 0
    with pytest.raises(LifecycleError, match="event loop in which this request was read is closed"):
        asyncio.run(_drain(generator))
    assert_forgotten(engine)


async def _drain(generator):
    async for _ in generator:
        pass


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_abandoned_rollout_is_aborted_and_forgotten(engine, face):
    policy = RolloutPolicy(face)
    for _ in range(5):
        loop = asyncio.new_event_loop()
        params = [SHORT, *[ENDLESS] * 4]
        rollout = policy.arollout(["hello"] * 5, params)
        first_output(loop, rollout)
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        del rollout, loop
    assert_forgotten(engine)


def test_the_requests_of_a_face_that_is_dropped_are_aborted_and_forgotten(engine):
    for _ in range(5):
        other = LLMEngine(engine.frontend)
        other.add_requests(["hello"] * 50, ENDLESS)
        del other
    gc.collect()
    last_of(engine, "hello", SHORT)
    assert_forgotten(engine)


def test_requests_that_are_read_to_their_end_are_forgotten(engine):
    request_ids = engine.add_requests(["hello"] * 500, SamplingParams(max_tokens=1, detokenize=False))
    step_further(engine)
    step_until(engine, lambda: not any(map(engine.is_unfinished, request_ids)))
    assert_forgotten(engine)
