"""Drafted tokens change nothing but the number of steps: against each sequence computed alone, from its tokens."""

from functools import partial

import pytest

from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.core import config
from tests.unit.core import oracle
from tests.unit.core.oracle import CHEAP_ROWS
from tests.unit.core.random_operations import SHAPES, Monkey


@pytest.fixture
def make_oracle_rig(make_rig):
    return partial(oracle.make_oracle_rig, make_rig)


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_operations_with_drafts_give_every_sequence_its_own_tokens(
    make_oracle_rig, monkeypatch, some_of, shape, seed
):
    monkeypatch.setattr(config, "_MAX_PROMPT_LOGITS", 5 * 23)
    rig = make_oracle_rig(vocab_size=23, policy_version=100, **SHAPES[shape])
    monkey = Monkey(rig, seed=f"drafts {shape} {seed}")
    for _ in range(some_of(1_000)):
        monkey.act()
        rig.core.check_integrity()
    rig.run(max_steps=20_000)
    rig.assert_clean()
    drafts = rig.core.stats.drafts
    assert {end.finish_reason for end in rig.ends.values()} >= {"stop", "length", "abort"}
    hardly_drafts = rig.config.async_scheduling or shape == "small budget"  # of three tokens a step
    assert hardly_drafts or sum(drafts.num_drafted) > sum(drafts.num_accepted) > 0
    assert all(a >= b for a, b in zip(drafts.num_accepted, drafts.num_accepted[1:], strict=False))


def test_right_drafts_save_steps(make_oracle_rig, make_rig):
    rigs = [make_oracle_rig(right=1.0), make_rig()]
    for rig in rigs:
        rig.add("a", max_tokens=64)
        rig.run()
        rig.assert_clean()
        if rig.config.async_scheduling:
            pytest.skip("nothing is drafted behind a step in flight")
    fast, slow = (rig.core.stats for rig in rigs)
    assert fast.num_steps < slow.num_steps / 3
    assert slow.num_steps - fast.num_steps == sum(fast.drafts.num_accepted)


def test_where_drafts_do_not_pay_few_sequences_are_followed_now_and_then(make_rig):
    rig = make_rig(speculation=SpeculationConfig(), step_seconds=((1, 1e-3), (64, 1.1e-3)))
    speculator = rig.core._scheduler.speculator
    speculator._rates.mean = 0.0
    choices = [speculator._which_to_follow(8, 8) for _ in range(64)]
    assert choices.count(0) == 7 * 8
    share_followed = sum(1 / every for every in choices if every) / len(choices)
    assert 0.00125 < share_followed * 8 * 10e-6 / (1e-3 + 8 * 40e-6) < 0.00275
    speculator._rates.mean = 0.9  # of what was followed then
    assert speculator._which_to_follow(8, 8) == 1


@pytest.mark.parametrize("num_samples", [3, 5, 64, 100])
def test_where_drafts_do_not_pay_at_most_four_sequences_are_followed_at_once(make_rig, num_samples):
    rig = make_rig(speculation=SpeculationConfig(), step_seconds=((1, 0.1), (64, 0.1)), max_num_batched_tokens=1024)
    speculator = rig.core._scheduler.speculator
    speculator._rates.mean = 0.0
    choices = [speculator._which_to_follow(num_samples, num_samples) for _ in range(16)]
    assert any(choices)
    assert all(1 <= len(range(0, num_samples, every)) <= 4 for every in choices if every)


def test_a_batch_that_shrinks_slowly_is_decided_about_once_in_sixteen_steps(make_rig, monkeypatch):
    rig = make_rig(speculation=SpeculationConfig(), step_seconds=CHEAP_ROWS)
    if rig.config.async_scheduling:
        pytest.skip("nothing is drafted behind a step in flight")
    speculator, decided = rig.core._scheduler.speculator, []
    monkeypatch.setattr(speculator, "_which_to_follow", lambda *sizes: decided.append(sizes) or 0)
    monkeypatch.setattr(speculator, "_follow_rows", lambda step: pytest.fail("nothing is to be followed"))
    for i in range(8):
        rig.add(str(i), prompt=[i], max_tokens=20 - i)
    rig.run()
    sizes = [len(work.samples) for work in rig.works if work.samples]
    assert sizes == [8] * 13 + [7, 6, 5, 4, 3, 2, 1]
    assert decided == [(8, 8), (4, 4), (2, 2), (1, 1)], "at first, and where half is left"
