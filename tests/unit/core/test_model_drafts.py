"""Drafts of a small model: its KV, when it is run, and that it changes nothing but the number of steps."""

import random

import pytest

from rollout_engine.base.speculation_config import DraftInfo, SpeculationConfig
from rollout_engine.core import draft_model
from rollout_engine.core.fake_executor import FakeExecutor
from tests.unit.core.random_operations import SHAPES, Monkey

CHEAP = ((1, 1.0), (64, 1.1))
"""Seconds of a step of the policy: every draft pays."""
CHEAP_DRAFTS = ((1, 0.01), (64, 0.02))


class DraftingExecutor(FakeExecutor):
    """Draws what the fake policy draws, but for some tokens."""

    right = 1.0
    random = random.Random(0)
    fails = False
    num_rows = 0

    def execute(self, work):
        self.num_rows += work.num_scheduled_tokens
        if self.fails:
            raise RuntimeError("told to fail")
        return super().execute(work)

    def _next_token(self, sequence_id, digest):
        token = super()._next_token(sequence_id, digest)
        return token if self.random.random() < self.right else (token + 1) % self.vocab_size


@pytest.fixture
def make_drafting_rig(make_rig):
    """make_drafting_rig(right=1.0, sources=(), **CoreConfig) -> a rig with a draft model, `rig.drafter`."""

    def make(right=1.0, sources=(), num_draft_blocks=200, draft_seconds=CHEAP_DRAFTS, **settings):
        draft = DraftInfo(
            num_blocks=num_draft_blocks, max_model_len=settings.get("max_model_len", 256), step_seconds=draft_seconds
        )
        speculation = SpeculationConfig(sources=sources, draft_model="drafter")
        rig = make_rig(speculation=speculation, step_seconds=CHEAP, draft=draft, **settings)
        if rig.config.async_scheduling:
            pytest.skip("nothing is drafted behind a step in flight")
        sizes = dict(block_size=rig.config.block_size, vocab_size=rig.config.vocab_size)
        rig.drafter = rig.executor.draft_model = DraftingExecutor(**sizes)
        rig.drafter.right, rig.drafter.random = right, random.Random(0)
        rig.model = rig.core.draft_model
        return rig

    return make


def check(rig):
    rig.core.check_integrity()
    rig.model._model.check_integrity()


@pytest.mark.quick(2)
@pytest.mark.parametrize("num_draft_blocks", [200, 9, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_random_operations_with_a_draft_model(make_drafting_rig, monkeypatch, some_of, shape, num_draft_blocks):
    monkeypatch.setattr(draft_model, "CHUNK", 24)
    sources = ("rollouts", "ngram") if num_draft_blocks == 9 else ()
    rig = make_drafting_rig(0.8, sources, vocab_size=23, num_draft_blocks=num_draft_blocks, **SHAPES[shape])
    monkey = Monkey(rig, seed=f"draft model {shape}")
    for _ in range(some_of(400)):
        monkey.act()
        check(rig)
        if monkey.random.random() < 0.02:
            rig.model.release(forget=False)
    rig.run(max_steps=20_000)
    rig.assert_clean()
    drafts = rig.core.stats.drafts
    assert not rig.model.is_off
    assert set(drafts.drafted_by_source) <= {"draft_model", *sources}
    assert sum(drafts.drafted_by_source.values()) == sum(drafts.num_drafted)
    assert sum(drafts.accepted_by_source.values()) == sum(drafts.num_accepted)
    if num_draft_blocks == 200 and shape != "small budget":
        assert sum(drafts.num_drafted) > sum(drafts.num_accepted) > 0
    assert rig.model._model._free == [] or len(rig.model._model._free) == num_draft_blocks


@pytest.mark.quick(5)
@pytest.mark.parametrize("num_spare_slots", [1, 6, 40])
@pytest.mark.parametrize("shape", ["roomy", "tiny pool"])
def test_random_operations_with_a_draft_model_of_a_policy_that_keeps_states(
    make_drafting_rig, some_of, shape, num_spare_slots
):
    sizes = SHAPES[shape]
    slots = dict(num_state_slots=sizes["max_num_seqs"] + num_spare_slots, state_interval=2 * sizes["block_size"])
    rig = make_drafting_rig(0.8, ("rollouts", "ngram"), vocab_size=23, **sizes, **slots)
    monkey = Monkey(rig, seed=f"draft model and states {shape}")
    for _ in range(some_of(400)):
        monkey.act()
        check(rig)
    rig.run(max_steps=20_000)
    rig.assert_clean()
    assert not rig.model.is_off
    assert rig.core.stats.drafts.accepted_by_source["draft_model"] > 0


def test_a_model_that_agrees_saves_steps(make_drafting_rig, make_rig):
    rigs = [make_drafting_rig(), make_rig()]
    for rig in rigs:
        rig.add("a", max_tokens=64)
        rig.run()
        rig.assert_clean()
    fast, slow = (rig.core.stats for rig in rigs)
    assert fast.num_steps < slow.num_steps / 3
    assert fast.drafts.num_drafted == fast.drafts.num_accepted
    assert fast.drafts.accepted_by_source == {"draft_model": sum(fast.drafts.num_accepted)}
    assert slow.num_steps - fast.num_steps == sum(fast.drafts.num_accepted)


def test_kv_of_right_drafts_is_kept_and_of_wrong_ones_written_over(make_drafting_rig):
    rig = make_drafting_rig(0.7)
    rig.add("a", range(30), max_tokens=60)
    rig.run()
    rig.assert_clean()
    drafted = sum(rig.core.stats.drafts.num_drafted)
    assert rig.drafter.num_rows < 30 + 60 + drafted, "tokens with KV were computed again"
    assert sum(rig.core.stats.drafts.num_accepted) > 20


def test_samples_of_a_prompt_compute_it_once(make_drafting_rig):
    rig = make_drafting_rig()
    rig.add("a", range(60), max_tokens=12, n=4)
    rig.run()
    rig.assert_clean()
    assert rig.drafter.num_rows < 60 + 4 * (12 + 8 + 4)


def test_long_prompts_are_computed_in_chunks(make_drafting_rig, monkeypatch):
    monkeypatch.setattr(draft_model, "CHUNK", 20)
    rig = make_drafting_rig()
    rig.add("a", range(90), max_tokens=40)
    most, run = [], rig.drafter.execute
    rig.drafter.execute = lambda work: (most.append(work.num_scheduled_tokens), run(work))[1]
    rig.run()
    rig.assert_clean()
    assert max(most) <= 20 + draft_model.SHORT
    assert sum(rig.core.stats.drafts.num_accepted) > 20


def test_sequences_that_do_not_fit_the_pool_take_turns_in_it(make_drafting_rig):
    rig = make_drafting_rig(num_draft_blocks=9)
    for name in (20, 21):
        rig.add(f"{name}", [name, *range(18)], max_tokens=12)
    rig.add("too long", range(40), max_tokens=8)
    for _ in range(200):
        rig.step()
        check(rig)
    rig.assert_clean()
    assert sum(rig.core.stats.drafts.num_accepted) > 12


@pytest.mark.parametrize("draft_seconds", [((1, 1.0), (64, 20.0)), ((1, 5.0), (64, 6.0))])
def test_a_model_that_is_too_slow_is_not_run(make_drafting_rig, draft_seconds):
    rig = make_drafting_rig(draft_seconds=draft_seconds)
    rig.add("a", max_tokens=60)
    rig.run()
    rig.assert_clean()
    assert rig.core.stats.drafts.num_drafted == []
    assert rig.drafter.num_rows == 0


def test_a_model_that_is_never_right_is_soon_run_now_and_then_only(make_drafting_rig):
    rig = make_drafting_rig(0.0, draft_seconds=((1, 0.125), (64, 0.25)), num_blocks=400, max_model_len=1_000)
    rig.add("a", max_tokens=100)
    rig.run()
    first = sum(rig.core.stats.drafts.num_drafted)
    assert 0 < first < 12
    before = rig.drafter.num_rows
    rig.add("b", max_tokens=600)
    rig.run()
    rig.assert_clean()
    assert sum(rig.core.stats.drafts.num_drafted) == first, "what is drafted to learn is not computed"
    assert 0 < rig.drafter.num_rows - before
    assert rig.drafter.num_rows - before < 700


def test_a_model_that_becomes_right_is_used_again(make_drafting_rig):
    rig = make_drafting_rig(0.0, num_blocks=400, max_model_len=1_000)
    rig.add("a", max_tokens=60)
    rig.run()
    assert not rig.model._may_pay
    rig.drafter.right = 1.0
    rig.add("b", max_tokens=400)
    rig.run()
    rig.assert_clean()
    assert sum(rig.core.stats.drafts.num_accepted) > 200


def test_a_prompt_is_computed_only_where_its_drafts_will_pay_for_that(make_drafting_rig):
    slow_prompts = ((1, 0.1), (16, 0.2), (200, 20.0))
    rig = make_drafting_rig(draft_seconds=slow_prompts, num_blocks=400, max_model_len=1_000)
    rig.add("short answer", [token % 97 for token in range(190)], max_tokens=16)
    rig.run()
    assert rig.drafter.num_rows == 0
    rig.add("long answer", [token % 97 for token in range(190)], max_tokens=200)
    rig.run()
    rig.assert_clean()
    assert sum(rig.core.stats.drafts.num_accepted) > 60


def test_a_model_that_fails_drafts_no_more_and_fails_no_request(make_drafting_rig, caplog):
    rig = make_drafting_rig()
    rig.add("a", max_tokens=40)
    for _ in range(4):
        rig.step()
    rig.drafter.fails = True
    rig.run()
    rig.assert_clean()
    assert rig.model.is_off and "The draft model failed" in caplog.text
    rig.drafter.fails = False
    rig.model.reset()
    before = sum(rig.core.stats.drafts.num_accepted)
    rig.add("b", max_tokens=40)
    rig.run()
    rig.assert_clean()
    assert sum(rig.core.stats.drafts.num_accepted) > before


def test_drafts_stop_at_the_end_of_a_sequence(make_drafting_rig):
    rig = make_drafting_rig(vocab_size=7)
    rig.add("a", range(5), max_tokens=50, eos=[3])
    rig.run()
    rig.assert_clean()
    drafts = rig.core.stats.drafts
    assert rig.tokens["a", 0][-1] == 3
    assert drafts.num_drafted == drafts.num_accepted


def test_sleep_forgets_the_models_kv(make_drafting_rig):
    rig = make_drafting_rig()
    rig.add("a", max_tokens=40)
    for _ in range(3):
        rig.step()
    rig.sleep(1, "keep")
    rig.drafter.release_kv()
    rig.wake_up()
    rig.run()
    rig.assert_clean()
    assert sum(rig.core.stats.drafts.num_accepted) > 20 and not rig.model.is_off
