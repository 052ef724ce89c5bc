"""Simulated runs by the thousand find nothing, replay to the same line, and find what was once wrong."""

import pytest

from tests.simulation.known_faults import FAULTS
from tests.simulation.run import Run
from tests.simulation.scheduler import Carriers

NUM_SEEDS = 1000
NUM_SEEDS_TO_FIND = 1500
"""Seeds within which every fault that is put back is found; most are within a hundred."""


@pytest.fixture(scope="module")
def carriers():
    with Carriers() as carriers:
        yield carriers


@pytest.mark.parametrize("part", range(5))
def test_no_schedule_breaks_a_promise(part, carriers):
    ends, faults = 0, 0
    for seed in range(part, NUM_SEEDS, 5):
        run = Run(seed).go(carriers)
        assert run.error is None, f"python -m tests.simulation {seed}: {run.error}"
        ends += sum(run.ledger.counts.values())
        faults += sum(run.faults.values())
    assert ends > NUM_SEEDS / 5 and faults > NUM_SEEDS / 10, (ends, faults)


def test_a_seed_replays_to_the_same_line(carriers):
    for seed in range(0, 200, 10):
        first, second = Run(seed).go(carriers), Run(seed).go(carriers)
        assert first.lines() == second.lines()
        assert first.digest() == second.digest()
    assert Run(0).go(carriers).digest() != Run(1).go(carriers).digest()


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_that_is_put_back_is_found(what, carriers, monkeypatch):
    FAULTS[what](monkeypatch)
    assert any(Run(seed).go(carriers).error is not None for seed in range(NUM_SEEDS_TO_FIND))


def test_a_run_that_fails_is_made_shorter_and_still_fails(carriers, monkeypatch):
    FAULTS["a call that ran is told as one that never will"](monkeypatch)
    run = next(run for run in (Run(seed).go(carriers) for seed in range(NUM_SEEDS_TO_FIND)) if run.error is not None)
    shortest = run.shortest(carriers)
    assert type(shortest.error) is type(run.error)
    assert shortest.limit is None or shortest.limit < run.num_choices
    assert Run(run.seed, shortest.limit).go(carriers).lines() == shortest.lines()
