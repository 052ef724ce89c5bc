"""Rounds of engines that divide experts, with threads in place of processes and a product in place of experts."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rollout_engine.base.errors import LifecycleError
from rollout_engine.kernels.cpu import phases
from rollout_engine.kernels.cpu.turns import BrokenTurnsError
from rollout_engine.model.ranks.expert_group import ExpertGroup
from rollout_engine.model.ranks.group_memory import GroupMemory, make_memory, mark_broken
from rollout_engine.model.ranks.waves import Field

pytestmark = pytest.mark.skipif(not phases.is_available(), reason="no C++ compiler here")

NUM_LAYERS, NUM_EXPERTS, SECONDS = 3, 4, 30.0


class Layer:
    """Experts that multiply rows by their number, of which an engine has every second one."""

    dtype = torch.float32

    def __init__(self, rank, size):
        self.own = [expert for expert in range(NUM_EXPERTS) if expert % size == rank]
        self.fails = False

    def compute(self, parts):
        if self.fails:
            raise MemoryError("no room")
        for part in parts:
            for expert in self.own:
                here = part.experts.flatten() == expert
                rows = part.rows.repeat_interleave(part.experts.shape[1], 0)
                part.outputs[here] = rows[here] * (expert + 1)


@pytest.fixture
def make_group():
    """Make engines of one group, which serve."""
    ended, memories = [], []

    def make(size=2, keys=None):
        memory = make_memory(size)
        memories.append(memory)
        groups = [ExpertGroup(GroupMemory(memory, size), rank) for rank in range(size)]
        for group, key in zip(groups, keys or [7] * size, strict=True):
            for _ in range(NUM_LAYERS):
                group.add_layer(Layer(group.rank, size))
            group.serve(key)
        ended.extend(groups)
        return groups, memory

    yield make
    for group in ended:
        group._has_left.set()
    for group in ended:
        group._thread.join(SECONDS)
    for memory in memories:
        os.close(memory)


def forward(group, rows, experts):
    """All layers of a forward, one after the other; returns the sums over the experts."""
    for layer in range(NUM_LAYERS):
        outputs = group.take_part(layer, rows, experts)
        rows = outputs.view(*experts.shape, -1).sum(1) / 8
    return rows


def step(group, rows, experts, **leaving):
    assert group.enter(SECONDS)
    try:
        return forward(group, rows, experts)
    finally:
        group.leave(**(dict(keeps=False, expects=False) | leaving))


def expected(rows, experts):
    for _ in range(NUM_LAYERS):
        rows = (rows[:, None] * (experts[..., None] + 1)).sum(1) / 8
    return rows


def draw(generator, num_rows):
    rows = torch.randint(-8, 8, (num_rows, 5), generator=generator).float()
    return rows, torch.rand(num_rows, NUM_EXPERTS, generator=generator).argsort(-1)[:, :2].sort(-1).values


def test_an_engine_computes_while_the_others_have_nothing_to_do(make_group):
    (first, second, third), _ = make_group(3)
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1, 4, 2):
        given = draw(generator, num_rows)
        assert torch.equal(step(first, *given), expected(*given))
    assert second.waves.num_dummies == third.waves.num_dummies == 3 and first.waves.num_dummies == 0
    assert (first.stats.num_rounds, first.stats.num_dummies) == (3, 0) and first.stats.wait_seconds > 0
    assert (second.stats.num_rounds, second.stats.num_dummies, second.stats.wait_seconds) == (0, 3, 0)


def test_engines_with_work_compute_in_the_same_rounds(make_group):
    groups, _ = make_group()
    generator = torch.Generator().manual_seed(1)
    given = {group: [draw(generator, 1 + index % 3) for index in range(20)] for group in groups}

    def play(group):
        return [step(group, *each, expects=index < 19) for index, each in enumerate(given[group])]

    with ThreadPoolExecutor() as pool:
        found = dict(zip(groups, pool.map(play, groups), strict=True))
    for group in groups:
        assert all(torch.equal(out, expected(*each)) for out, each in zip(found[group], given[group], strict=True))


def test_a_forward_that_breaks_off_leaves_no_engine_waiting(make_group):
    (first, second), _ = make_group()
    rows, experts = draw(torch.Generator().manual_seed(2), 2)
    assert first.enter(SECONDS)
    first.take_part(0, rows, experts)
    first.leave(keeps=False, expects=False)  # its step has failed behind the first layer
    assert torch.equal(step(second, rows, experts), expected(rows, experts))
    assert torch.equal(step(first, rows, experts), expected(rows, experts))


def test_no_engine_steps_before_all_have_the_same_weights(make_group):
    (first, second), _ = make_group()
    given = draw(torch.Generator().manual_seed(3), 2)
    first.close()
    assert not second.enter(0.01)
    first.open(8)
    assert not second.enter(0.01) and not first.enter(0.01)
    second.close()
    second.open(8)
    assert torch.equal(step(second, *given), expected(*given))


def test_a_close_waits_for_the_step_of_another_engine(make_group):
    (first, second), _ = make_group()
    rows, experts = draw(torch.Generator().manual_seed(4), 2)
    assert first.enter(SECONDS)
    closing = threading.Thread(target=second.close)
    closing.start()
    assert torch.equal(forward(first, rows, experts), expected(rows, experts))
    assert not second.is_closed or closing.is_alive()
    first.leave(keeps=False, expects=False)
    closing.join(SECONDS)
    assert second.is_closed and not first.enter(0.01)


def test_a_forward_outside_of_a_step_is_refused(make_group):
    (first, _), _ = make_group()
    with pytest.raises(LifecycleError, match="A forward outside of a step is not possible with data_parallel_size"):
        forward(first, *draw(torch.Generator().manual_seed(5), 1))


def test_experts_that_cannot_be_computed_end_the_group(make_group):
    (first, second), _ = make_group()
    reasons = []
    for group in (first, second):
        group.watch(reasons.append)
    second.layers[1].fails = True
    with pytest.raises(BrokenTurnsError):
        step(first, *draw(torch.Generator().manual_seed(6), 1))
    assert any(
        "engine 1 (data_parallel_size=2) ends: its own experts could not be computed" in each for each in reasons
    )
    assert any("engine 0 (data_parallel_size=2) ends: engine 1 of the 2" in each for each in reasons)


def test_an_engine_that_has_ended_is_named_to_the_others(make_group):
    (first, second), memory = make_group()
    reasons = []
    first.watch(reasons.append)
    mark_broken(memory, 1)
    with pytest.raises(BrokenTurnsError, match="engine 1 of the 2 that divide the experts .* has ended"):
        first._check_others()
    assert reasons


def test_an_engine_that_leaves_in_order_breaks_nothing_while_there_is_no_work(make_group):
    (first, second), _ = make_group()
    second.end()
    first._check_others()
    with pytest.raises(BrokenTurnsError):
        first.enter(SECONDS)


def test_rows_of_other_weights_are_refused_by_the_exchange_itself(make_group):
    (first, second), memory = make_group()
    second._key = 9  # which the protocol does not let happen
    with pytest.raises(BrokenTurnsError, match=r"the engines do not compute the same step|has ended"):
        step(first, *draw(torch.Generator().manual_seed(7), 1))
    assert GroupMemory(memory, 2).numbers[Field.BROKEN].any()
