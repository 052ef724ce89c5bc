"""KV outside of the pool: whose blocks serve whom, when they are saved, and what a store that is no good costs."""

import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_request import LoRAInfo
from rollout_engine.base.pictures import PictureInfo
from rollout_engine.core import tier
from rollout_engine.core.fake_tier import FakeStore, num_slot_bytes
from tests.unit.core.conftest import IMAGE
from tests.unit.core.test_pictures import A, B, around, picture
from tests.unit.core.tiered import with_tier

PROMPT = list(range(3, 43))
"""Ten blocks of four."""


@pytest.fixture
def make_tiered(make_rig):
    return lambda store=None, **config: with_tier(make_rig(has_tier=True, **config), store)


def cached(rig, name, prompt=PROMPT, **options):
    """Run one request; the tokens that it did not have to compute."""
    rig.add(name, prompt, **{"max_tokens": 3, **options})
    rig.run()
    return rig.num_cached_tokens[name]


def forget(rig):
    """Forget what the pool knows, as sleep does."""
    assert rig.core.reset_prefix_cache()


def test_another_engine_computes_only_what_is_behind_the_last_full_block(make_tiered):
    first = make_tiered()
    assert cached(first, "a", PROMPT + [1, 2]) == 0
    second = make_tiered(FakeStore(first.store.held), policy_version=7)
    assert cached(second, "a", PROMPT + [1, 2]) == 40
    assert second.core.stats.num_prompt_tokens_computed == 2
    assert second.core.stats.kv_tier.num_loaded == 10 and second.core.stats.kv_tier.num_loaded_tokens == 40
    assert cached(second, "b", PROMPT) == 36  # now here as well, and one token is computed in any case
    assert second.core.stats.kv_tier.num_loaded == 10
    for rig in (first, second):
        rig.assert_clean()


def test_a_request_of_one_token_leaves_its_blocks_behind(make_tiered):
    rig = make_tiered()
    cached(rig, "a", max_tokens=1)
    assert len(rig.store.held) == 10 and rig.tier.num_noted == 0


def test_every_block_is_saved_once(make_tiered):
    rig = make_tiered()
    saved = []
    save = rig.store.save
    rig.store.save = lambda key, data: (saved.append(key), save(key, data))
    for name in "abc":
        cached(rig, name, max_tokens=9, seed=1)
    forget(rig)
    cached(rig, "d", max_tokens=9, seed=1)
    assert len(saved) == len(set(saved)) == (40 + 8) // 4 == rig.core.stats.kv_tier.num_saved


def test_samples_of_one_prompt_load_it_once(make_tiered):
    rig = make_tiered()
    cached(rig, "a")
    forget(rig)
    assert cached(rig, "b", PROMPT + [5], n=5) == 40
    assert rig.core.stats.kv_tier.num_loaded == 10
    rig.assert_clean()


def test_requests_of_one_step_share_what_the_first_of_them_loads(make_tiered):
    rig = make_tiered()
    cached(rig, "a")
    forget(rig)
    for name in "bcd":
        rig.add(name, PROMPT + [5, 6, 7], max_tokens=2, seed=1)
    rig.run()
    assert rig.core.stats.kv_tier.num_loaded == 10
    rig.assert_clean()


def test_kv_of_other_weights_is_never_found(make_tiered):
    rig = make_tiered(policy_version=4)
    cached(rig, "a")
    rig.update()
    assert cached(rig, "b") == 0
    held = len(rig.store.held)
    rig.commit(2)  # an older number, other weights
    assert cached(rig, "c") == 0 and len(rig.store.held) == held + 10
    rig.assert_clean()


def test_requests_that_keep_their_kv_over_an_update_save_none_of_it(make_tiered):
    rig = make_tiered()
    rig.add("a", PROMPT[:10], max_tokens=30)
    for _ in range(5):
        rig.step()
    rig.update(kv="keep")
    held = set(rig.store.held)
    rig.run()
    assert len(set(rig.store.held) - held) <= 1  # one that was full before the update, under its old key
    assert cached(rig, "b", PROMPT[:10]) == 0
    rig.assert_clean()


def test_nothing_is_loaded_or_saved_while_the_digest_of_the_weights_is_unknown(make_tiered):
    rig = make_tiered()
    cached(rig, "a")
    held = len(rig.store.held)
    rig.digest_delay = 10_000
    rig.update()
    assert cached(rig, "b") == 0 and len(rig.store.held) == held
    rig._unknown_for = 0
    assert cached(rig, "c") == 36  # blocks that are known here are saved when they are found again
    assert len(rig.store.held) == held + 10
    rig.assert_clean()


def test_equal_weights_under_another_version_find_each_others_kv(make_tiered):
    rig = make_tiered()
    cached(rig, "a")
    serial = rig.executor.transfer.weights_serial
    rig.update()
    rig.update()
    rig.executor.transfer.weights_serial = serial
    assert cached(rig, "b", PROMPT + [1]) == 40
    rig.assert_clean()


@pytest.mark.parametrize("num_state_slots", [0, 16])
def test_a_preempted_sequence_comes_back_by_loads(make_tiered, num_state_slots):
    rig = make_tiered(num_blocks=17, max_num_seqs=8, num_state_slots=num_state_slots, state_interval=8)
    for name in "abcd":
        rig.add(name, [ord(name) - 50, *PROMPT[:15]], max_tokens=24)
    rig.run()
    stats = rig.core.stats
    assert stats.num_preemptions and stats.kv_tier.num_loaded
    assert stats.num_recomputed_tokens < stats.kv_tier.num_loaded_tokens or num_state_slots
    rig.assert_clean()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_saves_first_and_loses_no_prefix(make_tiered, level):
    rig = make_tiered()
    rig.add("a", max_tokens=30, prompt=PROMPT)
    for _ in range(4):
        rig.step()
    rig.sleep(level, "keep")
    assert rig.tier.num_noted == 0 and len(rig.store.held) >= 10
    rig.wake_up()
    if level == 2:
        rig.executor.weights, rig.core.lifecycle.dirty = "live", False
    rig.run()
    assert rig.core.stats.kv_tier.num_loaded >= 10
    assert rig.core.stats.num_recomputed_tokens <= 4
    rig.assert_clean()


def test_a_failed_step_saves_nothing_that_it_left(make_tiered):
    rig = make_tiered()
    rig.add("a", max_tokens=30, prompt=PROMPT)
    for _ in range(3):
        rig.step()
    rig.fail_at_steps.add(rig.next_step)
    rig.run()
    assert rig.ends["a", 0].finish_reason == "error" and rig.tier.num_noted == 0
    assert cached(rig, "b") == 36  # what was saved before is good
    rig.assert_clean()


def test_a_sequence_whose_token_cannot_be_drawn_takes_its_blocks_out_of_the_tier(make_tiered):
    rig = make_tiered()
    cached(rig, "a", PROMPT[:8])
    rig.add("b", prompt=PROMPT, max_tokens=30)
    for _ in range(6):
        rig.step()
    rig.errors[rig.ids("b")[0]] = "NaN"
    rig.run()
    assert rig.store.held == {} and cached(rig, "c") == 0
    rig.assert_clean()


def test_salts_adapters_and_kept_routing_are_apart(make_tiered):
    rig = make_tiered()
    table = rig.core.adapters
    table.put(0, LoRAInfo("one", 0, 8, 100, "digest 1", 0))
    table.put(1, LoRAInfo("two", 0, 8, 100, "digest 2", 0))
    kinds = [{}, {"salt": "s"}, {"lora": "one"}, {"lora": "two"}, {"return_routed_experts": True}]
    for number, options in enumerate(kinds):
        assert cached(rig, f"first {number}", **options) == 0
    forget(rig)
    for number, options in enumerate(kinds):
        assert cached(rig, f"second {number}", **options) == 36
    table.put(0, LoRAInfo("one", 1, 8, 100, "digest 3", 0))  # other values under the same name
    forget(rig)
    assert cached(rig, "third", lora="one") == 0
    table.put(1, LoRAInfo("two", 1, 8, 100, "digest 1", 0))  # values that were there under another name
    assert cached(rig, "fourth", lora="two") == 36
    rig.assert_clean()


@pytest.mark.parametrize("num_state_slots", [0, 40])
def test_blocks_behind_a_picture_are_found_for_the_same_picture_alone_by_every_engine(make_tiered, num_state_slots):
    slots = dict(block_size=4, num_state_slots=num_state_slots, state_interval=8)
    first = make_tiered(**slots)
    second = make_tiered(FakeStore(first.store.held), **slots)

    def run(rig, name, found):
        token_ids, placed = around(*found)
        forget(rig)
        return cached(rig, name, token_ids, pictures=placed)

    assert run(second, "another number", [picture(9)]) == 0
    assert run(first, "a", [A]) == 8
    assert run(second, "a", [A]) == 16 and run(second, "b", [B]) == 8 and run(first, "b", [B]) == 16
    assert run(first, "longer", [A, 7]) == 8  # the same picture, of more tokens
    assert cached(second, "text", around(A)[0]) == 8
    for rig in (first, second):
        rig.assert_clean()


def test_no_prefix_from_the_tier_ends_inside_a_picture_that_must_be_whole(make_tiered):
    whole = dict(block_size=4, pictures=PictureInfo(IMAGE, attention="all"))
    first = make_tiered(**whole)
    token_ids, placed = around(A)
    assert cached(first, "a", token_ids, pictures=placed) == 0 and len(first.store.held) == 5
    held = first.store.held
    for num_held, expected in ((4, 16), (3, 8), (2, 8), (1, 4)):  # the third and fourth block have parts of the picture
        second = make_tiered(FakeStore(dict(list(held.items())[:num_held])), **whole)
        assert cached(second, "a", token_ids, pictures=placed) == expected
        second.assert_clean()
    second = make_tiered(FakeStore(held), **whole)
    load, fourth = second.store.load, list(held)[3]
    second.store.load = lambda key: None if key == fourth else load(key)
    assert cached(second, "a", token_ids, pictures=placed) == 8
    second.assert_clean()


def test_a_step_that_has_loaded_enough_admits_no_further_sequence(make_tiered, monkeypatch):
    rig = make_tiered()
    prompts = {name: [50 + number, *PROMPT] for number, name in enumerate("abc")}
    for name, prompt in prompts.items():
        cached(rig, name, prompt)
    forget(rig)
    monkeypatch.setattr(tier, "MAX_STEP_BYTES", 11 * num_slot_bytes(4))
    for name, prompt in prompts.items():
        rig.add(f"{name} again", prompt, max_tokens=9)
    before = len(rig.works)
    rig.run()
    assert [len(work.kv_loads) for work in rig.works[before:] if work.kv_loads] == [20, 10]
    rig.assert_clean()


@pytest.mark.parametrize("options", [{"prompt_logprobs": 1}, {"return_hidden_states": "all"}])
def test_requests_that_skip_the_prefix_cache_load_nothing(make_tiered, options):
    rig = make_tiered()
    cached(rig, "a")
    forget(rig)
    assert cached(rig, "b", **options) == 0 and rig.store.num_fetched == rig.core.stats.kv_tier.num_loaded == 0
    rig.assert_clean()


@pytest.mark.parametrize("kind", ["misses", "lies"])
def test_a_store_that_gives_nothing_or_too_little_costs_a_computation(make_tiered, kind):
    rig = make_tiered(FakeStore(**{kind: 1.0}))
    cached(rig, "a")
    forget(rig)
    assert cached(rig, "b") == 0
    stats = rig.core.stats.kv_tier
    assert stats.num_loaded == 0 and (stats.num_refused if kind == "lies" else stats.num_missed) >= 1
    rig.assert_clean()


def test_a_request_waits_until_its_kv_is_fetched_and_others_do_not(make_tiered):
    rig = make_tiered()
    cached(rig, "a")
    forget(rig)
    ready = []
    rig.store.fetch = lambda keys: lambda seconds: bool(ready)
    rig.add("b", PROMPT, max_tokens=2)
    rig.add("c", [1, 2, 3], max_tokens=2)
    while ("c", 0) not in rig.ends:
        rig.step()
    assert rig.tokens["b", 0] == []
    rig.add("d", PROMPT + [9], max_tokens=2)
    rig.abort("d")
    ready.append(True)
    rig.run()
    assert rig.num_cached_tokens["b"] == 36
    rig.assert_clean()


def test_a_reset_forgets_the_tier_only_if_it_is_asked_to(make_tiered):
    rig = make_tiered()
    cached(rig, "a")
    assert rig.core.reset_prefix_cache() and len(rig.store.held) == 10
    assert rig.core.reset_prefix_cache(reset_connector=True) and not rig.store.held
    assert cached(rig, "b") == 0
    rig.add("c", PROMPT, max_tokens=20)
    rig.step()
    assert not rig.core.reset_prefix_cache(reset_connector=True) and rig.store.held
    rig.run()
    rig.assert_clean()


def test_blocks_to_drop_are_forgotten_here_and_in_the_tier_but_for_shared_ones(make_tiered):
    rig = make_tiered()
    cached(rig, "a", PROMPT[:16])
    cached(rig, "b", kv_hint="drop", max_tokens=8, n=3)
    assert len(rig.store.held) == 4
    assert cached(rig, "c") == 16
    rig.assert_clean()


def test_blocks_to_keep_are_the_last_to_be_given_up(make_rig):
    rig = make_rig(num_blocks=17)
    cached(rig, "a", PROMPT[:16], kv_hint="keep")
    for number in range(4):
        cached(rig, f"b{number}", [50 + number, *PROMPT[:29]], seed=number)
    assert cached(rig, "c", PROMPT[:20]) == 16
    rig.assert_clean()


def test_a_prefetching_request_fetches_and_ends_without_a_token(make_tiered):
    rig = make_tiered()
    cached(rig, "a")
    forget(rig)
    ready = []
    rig.store.fetch = lambda keys: ready.append(len(keys)) or (lambda seconds: len(ready) > 1)
    source = rig.requests["a"]
    request = source.__class__(
        prompt_token_ids=PROMPT,
        params=source.params.clone(kv_hint="prefetch", n=2),
        max_tokens=3,
        seed=1,
        first_sequence_id=100,
    )
    rig.core.add_request(request)
    assert rig.core.step().ended == [] and ready == [9]
    ready.append(True)
    ends = []
    while rig.core.has_unfinished_requests():
        ends += rig.core.step().ended
    assert sorted((end.sequence_id, end.finish_reason) for end in ends) == [(100, "length"), (101, "length")]
    assert rig.core.stats.num_steps == len(rig.works)
    rig.core.check_integrity()


def test_prefetching_needs_a_connector(make_rig):
    with pytest.raises(RequestError, match="kv_hint='prefetch' is not allowed: must be None, 'keep' or 'drop'"):
        make_rig().add("a", kv_hint="prefetch")


def test_a_tail_gives_way_to_whole_blocks_of_the_tier(make_tiered):
    first = make_tiered()
    cached(first, "a", PROMPT)
    second = make_tiered(FakeStore(first.store.held))
    cached(second, "short", PROMPT[:10], max_tokens=1)  # its third block is filled in part
    assert cached(second, "long", PROMPT + [1]) == 40
    second.assert_clean()


def test_a_model_with_states_continues_from_a_state_of_another_engine(make_tiered):
    slots = dict(num_state_slots=24, state_interval=16)
    first = make_tiered(**slots)
    cached(first, "a", PROMPT + [1, 2])
    second = make_tiered(FakeStore(first.store.held), **slots)
    assert cached(second, "a", PROMPT + [1, 2]) == 40
    assert cached(second, "b", PROMPT[:30] + [90]) == 16  # the last state in front of the difference
    assert second.core.stats.kv_tier.num_loaded == 11 + 1
    for rig in (first, second):
        rig.assert_clean()


def test_blocks_without_a_state_are_of_no_use_to_a_model_with_states(make_tiered):
    slots = dict(num_state_slots=24, state_interval=16)
    first = make_tiered(**slots)
    cached(first, "a", PROMPT)
    sizes = {len(data) for data in first.store.held.values()}
    blocks = {key: data for key, data in first.store.held.items() if len(data) == max(sizes)}
    second = make_tiered(FakeStore(blocks), **slots)
    assert cached(second, "a", PROMPT) == 0
    second.assert_clean()
