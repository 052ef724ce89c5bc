"""Random operations against the slow truth: each sequence computed alone, from its tokens."""

import pytest

from rollout_engine.core import config
from tests.unit.core.random_operations import SHAPES, Monkey

NUM_OPERATIONS = 1_500


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", SHAPES)
def test_random_operations_give_every_sequence_its_own_tokens_and_leak_nothing(
    make_rig, monkeypatch, some_of, shape, seed
):
    monkeypatch.setattr(config, "_MAX_PROMPT_LOGITS", 5 * 23)
    rig = make_rig(vocab_size=23, policy_version=100, **SHAPES[shape])
    monkey = Monkey(rig, seed=f"{shape} {seed}")
    for _ in range(some_of(NUM_OPERATIONS)):
        monkey.act()
        rig.core.check_integrity()
    rig.run(max_steps=20_000)
    rig.assert_clean()
    for end in rig.ends.values():
        if end.finish_reason == "error":
            assert end.error == "spoilt" or "told to fail" in end.error
    reasons = {end.finish_reason for end in rig.ends.values()}
    assert reasons == {"stop", "length", "abort", "error"}


@pytest.mark.quick(1)
def test_the_shapes_cover_preemption_copies_drops_and_cache_hits(make_rig):
    rig = make_rig(vocab_size=23, policy_version=100, **SHAPES["tiny pool"])
    monkey = Monkey(rig, seed=1)
    for _ in range(1_000):
        monkey.act()
    stats = rig.core.stats
    counts = (stats.num_preemptions, stats.num_references_dropped, stats.num_block_copies, stats.num_cached_tokens)
    assert min(counts) > 10, stats
