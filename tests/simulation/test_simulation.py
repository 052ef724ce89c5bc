"""Simulated runs by the thousand find nothing, replay to the same line, and find what was once wrong."""

import pytest

from tests.simulation.known_faults import FAULTS
from tests.simulation.run import Run
from tests.simulation.scheduler import Carriers

NUM_SEEDS = 1000
NUM_SEEDS_TO_FIND = 2000
"""Seeds within which every fault that is put back is found; most are within a hundred."""
RARE = {
    "a pause is answered as complete by an engine that was shut down",
    "what a core sent last is lost to a client that hears of its end first",
    "an engine that shuts down where no thread can start stays half open",
    "an update that fails leaves the engine UPDATING",
    "KV of the old weights is used after an update that asked for it to be computed again",
    "a sequence that was aborted ends again when its last step comes back",
    "a client that leaves where no thread can start ends the core",
    "weights that could not be woken count as awake",
    "an update whose thread cannot start leaves the engine UPDATING",
    "a commit meets a step in flight",
}
"""Faults that take hundreds of seeds."""


@pytest.fixture(scope="module")
def carriers():
    with Carriers() as carriers:
        yield carriers


@pytest.mark.parametrize("first", [0, pytest.param(NUM_SEEDS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", ["in process", pytest.param("own process", marks=pytest.mark.slow)])
def test_no_schedule_breaks_a_promise(part, first, carriers, some_of):
    ends, faults = 0, 0
    num_seeds = some_of(NUM_SEEDS)
    for seed in range(first + (part == "own process"), first + num_seeds, 2):
        run = Run(seed).go(carriers)
        assert run.error is None, f"python -m tests.simulation {seed}: {run.error}"
        ends += sum(run.ends.values())
        faults += sum(run.faults.values())
    assert ends > num_seeds and faults > num_seeds / 2, (ends, faults)


def test_a_seed_replays_to_the_same_line(carriers, some_of):
    for seed in range(some_of(20)):
        first, second = Run(seed).go(carriers), Run(seed).go(carriers)
        assert first.lines() == second.lines()
        assert first.digest() == second.digest()
    assert Run(0).go(carriers).digest() != Run(1).go(carriers).digest()


@pytest.mark.quick(1)
@pytest.mark.parametrize("what", [pytest.param(what, marks=[pytest.mark.slow] * (what in RARE)) for what in FAULTS])
def test_a_fault_that_is_put_back_is_found(what, carriers, monkeypatch):
    FAULTS[what](monkeypatch)
    runs = (Run(seed).go(carriers) for seed in range(NUM_SEEDS_TO_FIND))
    error = next(run.error for run in runs if run.error is not None)
    assert not isinstance(error, AttributeError | NameError), f"the fault is put back wrongly: {error}"


def test_a_run_that_fails_is_made_shorter_and_still_fails(carriers, monkeypatch):
    FAULTS["a call that ran is told as one that never will"](monkeypatch)
    run = next(run for run in (Run(seed).go(carriers) for seed in range(NUM_SEEDS_TO_FIND)) if run.error is not None)
    shortest = run.shortest(carriers)
    assert type(shortest.error) is type(run.error)
    assert shortest.limit is None or shortest.limit < run.num_choices
    assert Run(run.seed, shortest.limit).go(carriers).lines() == shortest.lines()
