"""Random operations on a model that keeps states: the fake checks each slot that is read, and every token is true."""

import pytest

from rollout_engine.core import config
from tests.unit.core.oracle import make_oracle_rig
from tests.unit.core.random_operations import SHAPES, Monkey

SPARE = {"none": 1, "few": 4, "many": 60}
"""Slots beyond those of running sequences: "none" is the one that every pool has."""


def sizes_of(shape, spare):
    sizes = SHAPES[shape]
    slots = dict(num_state_slots=sizes["max_num_seqs"] + SPARE[spare], state_interval=2 * sizes["block_size"])
    return dict(vocab_size=23, policy_version=100) | sizes | slots


def run(rig, seed, num_operations):
    monkey = Monkey(rig, seed)
    for _ in range(num_operations):
        monkey.act()
        rig.core.check_integrity()
    rig.run(max_steps=20_000)
    rig.assert_clean()
    for end in rig.ends.values():
        if end.finish_reason == "error":
            assert end.error == "spoilt" or "told to fail" in end.error


@pytest.fixture(autouse=True)
def few_scored_tokens(monkeypatch):
    monkeypatch.setattr(config, "_MAX_PROMPT_LOGITS", 5 * 23)


@pytest.mark.quick(3)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spare", SPARE)
@pytest.mark.parametrize("shape", SHAPES)
def test_random_operations_on_states_give_every_sequence_its_own_tokens(make_rig, some_of, shape, spare, seed):
    rig = make_rig(**sizes_of(shape, spare))
    run(rig, f"states {shape} {spare} {seed}", some_of(500))
    assert {end.finish_reason for end in rig.ends.values()} >= {"stop", "length"}


@pytest.mark.quick(3)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spare", SPARE)
@pytest.mark.parametrize("shape", SHAPES)
def test_random_drafts_on_states_give_every_sequence_its_own_tokens(make_rig, some_of, shape, spare, seed):
    rig = make_oracle_rig(make_rig, **sizes_of(shape, spare))
    if rig.config.async_scheduling:
        pytest.skip("nothing is drafted behind a step in flight")
    run(rig, f"drafted states {shape} {spare} {seed}", some_of(500))
    drafts = rig.core.stats.drafts
    assert shape == "small budget" or sum(drafts.num_drafted) > sum(drafts.num_accepted) > 0


@pytest.mark.quick(1)
def test_the_operations_reach_all_that_is_done_with_states(make_rig):
    rig = make_rig(**sizes_of("tiny pool", "many"))
    run(rig, "coverage", 1_000)
    stats, rows = rig.core.stats, [row for work in rig.works for row in work.scheduled if row.state is not None]
    counts = (stats.num_preemptions, stats.num_references_dropped, stats.num_block_copies, stats.num_cached_tokens)
    assert min(counts) > 10, stats
    assert sum(row.state.source == -1 for row in rows) > 10
    assert sum(row.state.source not in (-1, row.state.slot) for row in rows) > 10
    assert sum(bool(row.state.others) for row in rows) > 10
