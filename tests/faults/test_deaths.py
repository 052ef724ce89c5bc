"""Cores, parents and trainers that are killed or stopped: everybody is told soon, and what lives goes on."""

import asyncio
import signal

import pytest

from rollout_engine import AsyncLLM
from tests.faults.aborts import RandomAborts
from tests.faults.clean import Leftovers, assert_clean
from tests.faults.deaths import OPTIONS, TrainerDeaths, kill_core


@pytest.fixture(scope="module")
def engine(checkpoint):
    with AsyncLLM(checkpoint, **OPTIONS) as engine:
        yield engine


@pytest.mark.slow
def test_every_caller_hears_of_a_killed_core_in_time(checkpoint):
    leftovers = Leftovers()
    death = kill_core(checkpoint, at_output=100, num_callers=32, number=signal.SIGKILL, hang_seconds=600.0)
    assert len(death.seconds) == 32 and "status -9" in death.message
    assert max(death.seconds) < 10  # none waited to be told that it hangs; the soak measures it
    leftovers.assert_none()


@pytest.mark.slow
def test_trainers_that_die_in_a_push_leave_whole_weights_and_room_for_the_next(engine):
    async def run():
        deaths = TrainerDeaths(engine, seed=3)
        await deaths.run(["shm", "store", "gloo"], num_deaths=6, seconds=300)
        await assert_clean(engine)
        return deaths

    deaths = asyncio.run(run())
    assert deaths.num_deaths == 6 and deaths.spelled.num_right > 0
    assert deaths.spelled.num_wrong == 0


@pytest.mark.slow
def test_trainers_that_stand_still_in_a_push_are_given_up_by_its_deadline(engine):
    async def run():
        deaths = TrainerDeaths(engine, seed=6, stopped=1.0)
        await deaths.run(["shm", "store", "gloo"], num_deaths=3, seconds=300)
        await assert_clean(engine)
        return deaths

    deaths = asyncio.run(run())
    assert deaths.num_deaths == 3 and deaths.spelled.num_wrong == 0


@pytest.mark.slow
def test_random_aborts_leave_no_block(engine):
    aborts = RandomAborts(engine, seed=4)
    asyncio.run(aborts.run(num_aborts=1000, seconds=300))
    assert aborts.ledger.num_ended == aborts.num_aborts >= 1000
    assert {"abort", "left"} <= aborts.ledger.counts.keys()
