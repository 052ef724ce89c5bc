"""Any order of verbs, several at once: every request ends once with its own tokens, and nothing leaks."""

import asyncio

import pytest

from rollout_engine import AsyncLLM
from tests.faults.clean import Leftovers, assert_clean
from tests.faults.schedules import Schedule, make_menu

OPTIONS = dict(num_kv_blocks=60, max_num_seqs=16, num_threads=1, skip_tokenizer_init=True)
"""Few blocks: requests are preempted."""


@pytest.fixture(scope="module")
def leftovers():
    return Leftovers()


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="in turn", marks=pytest.mark.slow), pytest.param(True, id="ahead")],
)
def engine(request, checkpoint, leftovers):
    with AsyncLLM(checkpoint, **OPTIONS, async_scheduling=request.param) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_schedules_end_every_request_once_with_its_own_tokens(engine, seed):
    async def run():
        schedule = Schedule(engine, await make_menu(engine), seed)
        await schedule.run(seconds=300, max_operations=600)
        await assert_clean(engine)
        return schedule

    schedule = asyncio.run(run())
    assert schedule.ledger.num_ended > 20, schedule.ledger.counts
    assert {"length", "abort"} <= schedule.ledger.counts.keys(), schedule.ledger.counts


@pytest.mark.slow
def test_nothing_is_left_of_an_engine_after_random_schedules(engine, leftovers):
    engine.shutdown()
    leftovers.assert_none(engine.address)
