"""Steps that fill a pipe of stages: no two in flight draw for one sequence, and outputs are those of one stage."""

from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from rollout_engine.core import config
from tests.unit.core.conftest import Rig
from tests.unit.core.random_operations import SHAPES, Monkey
from tests.unit.core.test_random_lifecycles import Lifecycles


class StagedRig(Rig):
    """A rig whose first stage needs every token of a step when that is submitted."""

    def __init__(self, num_stages, **options):
        super().__init__(num_stages=num_stages, **options)
        self.num_rows = []
        """Rows of each step, as it was submitted."""
        self.most_in_flight = 0

    def submit(self, work):
        for row in work.scheduled:
            sequence = self.core._requests.live(row.sequence_id)
            assert row.num_computed_tokens + row.num_scheduled_tokens <= len(sequence.token_ids), "a token is not known"
        drawn = [task.sequence_id for step in self.core._steps for task in step.work.samples]
        assert len(drawn) == len(set(drawn)), "two steps in flight draw for one sequence"
        self.num_rows.append(len(work.scheduled))
        self.most_in_flight = max(self.most_in_flight, len(self.core._steps))
        return super().submit(work)


@pytest.fixture(params=[2, 3])
def make_staged(request):
    return partial(StagedRig, request.param)


def test_steps_share_the_sequences_evenly(make_staged):
    rig = make_staged(max_num_seqs=12, max_num_batched_tokens=1000, num_blocks=200)
    for number in range(12):
        rig.add(f"r{number}", [number], max_tokens=20, seed=number)
    rig.run()
    num_stages = rig.config.num_stages
    assert rig.most_in_flight == num_stages
    assert set(rig.num_rows[:-num_stages]) == {12 // num_stages}
    rig.assert_clean()


def test_uneven_steps_become_even(make_staged):
    rig = make_staged(max_num_seqs=12, max_num_batched_tokens=1000, num_blocks=200)
    rig.add("early", [1], max_tokens=60)
    for _ in range(3):
        rig.step()
    for number in range(11):
        rig.add(f"r{number}", [number], max_tokens=40, seed=number)
    rig.run()
    middle = rig.num_rows[20:-20]
    assert max(middle) <= -(-12 // rig.config.num_stages)
    rig.assert_clean()


def test_chunks_of_a_prompt_follow_each_other_without_a_wait(make_staged):
    rig = make_staged(max_num_batched_tokens=16, num_blocks=64)
    rig.add("long", range(96), max_tokens=2)
    rig.core.step()
    assert len(rig.core._steps) == rig.config.num_stages - 1
    assert all(step.rows for step in rig.core._steps)


def test_a_single_sequence_is_in_one_step_at_a_time(make_staged):
    rig = make_staged()
    rig.add("a", max_tokens=5)
    rig.run()
    assert rig.most_in_flight == 1 and rig.core.stats.num_surplus_tokens == 0
    rig.assert_clean()


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_random_operations_give_every_sequence_its_own_tokens(make_staged, monkeypatch, some_of, shape):
    monkeypatch.setattr(config, "_MAX_PROMPT_LOGITS", 5 * 23)
    rig = make_staged(vocab_size=23, policy_version=100, **SHAPES[shape])
    monkey = Monkey(rig, seed=f"stages {shape}")
    for _ in range(some_of(700)):
        monkey.act()
        rig.core.check_integrity()
    rig.run(max_steps=20_000)
    rig.assert_clean()


@pytest.mark.parametrize("num_state_slots", [0, 12])
def test_any_order_of_verbs_ends_every_request_once(make_staged, some_of, num_state_slots):
    chosen = settings(
        max_examples=some_of(5), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    run_state_machine_as_test(lambda: Lifecycles(make_staged, num_state_slots), settings=chosen)
