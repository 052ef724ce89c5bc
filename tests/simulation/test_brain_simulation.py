"""A fleet's decisions in a storm of events: requests end once, with their tokens, and nothing stale is served."""

from collections import Counter

import pytest

from tests.simulation.known_brain_faults import FAULTS
from tests.simulation.run import BrainRun

NUM_SEEDS = 250
NUM_SEEDS_TO_FIND = 1000
"""Seeds within which every fault that is put back is found; most are within twenty."""
_CHEAP = 2
"""Faults that are looked for every time: the first ones of the table."""


@pytest.mark.slow
def test_no_storm_of_events_breaks_a_promise():
    ends, faults = Counter(), Counter()
    for seed in range(NUM_SEEDS):
        run = BrainRun(seed).go()
        assert run.error is None, f"python -m tests.simulation --brain {seed}: {run.error}"
        ends += run.ends
        faults += run.faults
    assert faults.total() > 3000 and ends.total() > 10 * NUM_SEEDS, (ends, faults)
    rare = ("half a commit", "late commit", "told twice", "restart")
    assert all(faults[what] > 20 for what in rare), faults


def test_a_seed_replays_to_the_same_line():
    for seed in range(5):
        first, second = BrainRun(seed).go(), BrainRun(seed).go()
        assert first.lines() == second.lines() and len(first.lines()) > 20
        assert first.digest() == second.digest()


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.slow] * (i >= _CHEAP)) for i, what in enumerate(FAULTS)]
)
def test_a_fault_that_is_put_back_is_found(what, monkeypatch):
    FAULTS[what](monkeypatch)
    runs = (BrainRun(seed).go() for seed in range(NUM_SEEDS_TO_FIND))
    error = next(run.error for run in runs if run.error is not None)
    assert not isinstance(error, AttributeError | NameError | TypeError), f"the fault is put back wrongly: {error}"
