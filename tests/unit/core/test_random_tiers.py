"""Random operations on engines over a tier that forgets, misses, lies and takes its time: every token is true."""

import random

import pytest

from rollout_engine.base.pictures import PictureInfo
from rollout_engine.core import config
from rollout_engine.core.fake_tier import FakeStore
from tests.unit.core.conftest import IMAGE
from tests.unit.core.oracle import make_oracle_rig
from tests.unit.core.random_operations import SHAPES, Monkey
from tests.unit.core.test_pictures import PictureMonkey
from tests.unit.core.tiered import with_tier

STORES = {
    "good": dict(),
    "bad": dict(forgets=0.2, misses=0.1, lies=0.1, waits=5),
}
CACHING = [shape for shape, sizes in SHAPES.items() if sizes.get("enable_prefix_caching", True)]


def _slow_unless(is_quick, value):
    return value if is_quick else pytest.param(value, marks=pytest.mark.slow)


class TierMonkey(Monkey):
    """Gives hints, forgets what the pool knows, and has the digest of new weights known late."""

    def add(self):
        super().add()
        self.rig.digest_delay = self.random.choice([0, 0, 1, 5])
        if self.random.random() < 0.1:
            self.rig.core.quiesce()
            self.rig.core.reset_prefix_cache(
                reset_running_requests=self.random.random() < 0.5, reset_connector=self.random.random() < 0.1
            )
        if self.random.random() < 0.05:
            self.rig.sleep(1, "keep")
            assert self.rig.tier.num_noted == 0
            self.rig.wake_up()


class PictureTierMonkey(TierMonkey, PictureMonkey):
    """Its prompts have pictures, whose numbers differ from engine to engine."""


def with_hints(rig, seed):
    """Some of the requests say what is to become of their KV."""
    add, choose = rig.add, random.Random(seed)

    def add_with_hint(*arguments, **options):
        add(*arguments, **options, kv_hint=choose.choice([None, None, None, "keep", "drop"]))

    rig.add = add_with_hint
    return rig


def run(rigs, seed, num_operations, kind=TierMonkey):
    monkeys = [kind(rig, f"{seed} {number}") for number, rig in enumerate(rigs)]
    for _ in range(num_operations):
        for monkey in monkeys:
            monkey.act()
            monkey.rig.core.check_integrity()
    for rig in rigs:
        rig.run(max_steps=20_000)
        rig.assert_clean()
        for end in rig.ends.values():
            if end.finish_reason == "error":
                assert end.error in ("spoilt", "it cannot be computed") or "told to fail" in end.error


def sizes_of(shape, num_spare):
    sizes = dict(vocab_size=23, policy_version=100) | SHAPES[shape]
    if num_spare:
        sizes |= dict(num_state_slots=sizes["max_num_seqs"] + num_spare, state_interval=2 * sizes["block_size"])
    return sizes


@pytest.fixture(autouse=True)
def few_scored_tokens(monkeypatch):
    monkeypatch.setattr(config, "_MAX_PROMPT_LOGITS", 5 * 23)


@pytest.mark.quick(3)
@pytest.mark.parametrize("seed", [0, _slow_unless(False, 1)])
@pytest.mark.parametrize("store", [_slow_unless(store == "bad", store) for store in STORES])
@pytest.mark.parametrize("num_spare", [0, _slow_unless(False, 1), 12])
@pytest.mark.parametrize(
    "shape", [_slow_unless(shape in ("tiny pool", "wide blocks, few slots"), shape) for shape in CACHING]
)
def test_random_operations_over_a_tier_give_every_sequence_its_own_tokens(
    make_rig, some_of, shape, num_spare, store, seed
):
    rig = with_tier(make_rig(**sizes_of(shape, num_spare)), FakeStore(**STORES[store], seed=seed))
    run([with_hints(rig, seed)], f"tier {shape} {num_spare} {store} {seed}", some_of(400))


@pytest.mark.quick(2)
@pytest.mark.parametrize("num_spare", [0, 12])
def test_two_engines_over_one_tier_give_every_sequence_its_own_tokens(make_rig, some_of, num_spare):
    held = {}
    stores = [FakeStore(held, **STORES["bad"], seed=seed) for seed in range(2)]
    rigs = [with_tier(make_rig(**sizes_of("tiny pool", num_spare)), store) for store in stores]
    run(rigs, f"two {num_spare}", some_of(250))
    assert all(rig.core.stats.kv_tier.num_saved for rig in rigs)


@pytest.mark.parametrize("attention", ["causal", _slow_unless(False, "all")])
@pytest.mark.parametrize("num_spare", [0, _slow_unless(False, 12)])
def test_two_engines_over_one_tier_take_no_picture_for_another(make_rig, some_of, num_spare, attention):
    held = {}
    sizes = sizes_of("tiny pool", num_spare) | dict(pictures=PictureInfo(IMAGE, attention=attention))
    rigs = [with_tier(make_rig(**sizes), FakeStore(held, **STORES["bad"], seed=seed)) for seed in range(2)]
    run(rigs, f"pictures {num_spare} {attention}", some_of(300), PictureTierMonkey)
    assert all(rig.core.stats.kv_tier.num_saved for rig in rigs)
    assert sum(len(request.pictures) for rig in rigs for request in rig.requests.values()) > 10


@pytest.mark.parametrize("num_spare", [0, 12])
def test_drafts_over_a_tier_give_every_sequence_its_own_tokens(make_rig, some_of, num_spare):
    rig = make_oracle_rig(make_rig, **sizes_of("tiny pool", num_spare))
    if rig.config.async_scheduling:
        pytest.skip("nothing is drafted behind a step in flight")
    run([with_tier(rig, FakeStore(**STORES["bad"]))], f"drafts {num_spare}", some_of(300))


@pytest.mark.quick(1)
def test_the_operations_reach_all_that_is_done_with_a_tier(make_rig):
    rig = with_tier(make_rig(**sizes_of("tiny pool", 12)), FakeStore(**STORES["bad"]))
    run([with_hints(rig, 0)], "coverage", 600)
    stats = rig.core.stats.kv_tier
    assert min(stats.num_loaded, stats.num_saved, stats.num_missed, stats.num_refused, rig.store.num_fetched) > 3
    assert any(load.is_state for work in rig.works for load in work.kv_loads)
    assert any(save.is_state for work in rig.works for save in work.kv_saves)
