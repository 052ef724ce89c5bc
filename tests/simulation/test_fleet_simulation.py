"""Simulated fleets: whatever becomes of replicas, requests end once, with their tokens, and who lives catches up."""

import pytest

from tests.simulation.known_fleet_faults import FAULTS
from tests.simulation.run import FleetRun
from tests.simulation.scheduler import Carriers

NUM_SEEDS_TO_FIND = 600
"""Seeds within which every fault that is put back is found; most are within twenty."""


@pytest.fixture(scope="module")
def carriers():
    with Carriers() as carriers:
        yield carriers


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 80), marks=pytest.mark.slow)], ids=["few", "many"])
def test_no_disaster_breaks_a_promise(seeds, carriers):
    ends, faults = 0, 0
    for seed in seeds:
        run = FleetRun(seed).go(carriers)
        assert run.error is None, f"python -m tests.simulation --fleet {seed}: {run.error}"
        ends += sum(run.ends.values())
        faults += sum(run.faults.values())
    assert ends > 5 * len(seeds) and faults > 5 * len(seeds), (ends, faults)


def test_a_seed_replays_to_the_same_line(carriers, some_of):
    for seed in range(some_of(5)):
        first, second = FleetRun(seed).go(carriers), FleetRun(seed).go(carriers)
        assert first.lines() == second.lines()
        assert first.digest() == second.digest()


@pytest.mark.slow
@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_that_is_put_back_is_found(what, carriers, monkeypatch):
    FAULTS[what](monkeypatch)
    runs = (FleetRun(seed).go(carriers) for seed in range(NUM_SEEDS_TO_FIND))
    error = next(run.error for run in runs if run.error is not None)
    assert not isinstance(error, AttributeError | NameError | TypeError), f"the fault is put back wrongly: {error}"
