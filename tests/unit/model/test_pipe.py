"""Hidden states pass from one stage to the next: by serials, in any order, and never from a stage that is gone."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rollout_engine.kernels.cpu import turns
from rollout_engine.kernels.cpu.turns import BrokenTurnsError
from rollout_engine.model.ranks.pipe import PassedOn
from rollout_engine.model.ranks.pipe_memory import PipePlan, num_places, socket_pair
from rollout_engine.model.ranks.pipe_place import join_pipe

pytestmark = pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here")


def places_of(num_stages, ranks_of_stage):
    """The place of each rank, all in this process."""
    plan = PipePlan(num_stages, ranks_of_stage)
    memory = os.memfd_create("pipe")
    os.ftruncate(memory, plan.total_bytes)
    before, behind = {}, {rank: [] for rank in range(plan.num_ranks)}
    for stage in range(num_stages - 1):
        for reader in plan.readers_of(stage):
            ours, before[reader] = socket_pair()
            behind[plan.writer_of(stage)].append(ours)
    ends = {rank: [*([before[rank]] if rank in before else []), *behind[rank]] for rank in behind}
    found = [join_pipe(plan, memory, rank, ends[rank]) for rank in range(plan.num_ranks)]
    os.close(memory)
    for place in found:
        place.pipe.serve()
    return found


@pytest.fixture
def make_places():
    made = []

    def make(*sizes):
        made.append(places_of(*sizes))
        return made[-1]

    yield make
    for place in (place for places in made for place in places):
        place.pipe.close()


@pytest.fixture
def pipes(make_places):
    last, first = (place.pipe for place in make_places(2, 1))
    return first, last


def test_ranks_are_numbered_from_the_last_stage_on(make_places):
    plan = PipePlan(3, 2)
    assert [plan.stage_of(rank) for rank in range(6)] == [2, 2, 0, 0, 1, 1]
    assert [plan.writer_of(stage) for stage in range(3)] == [2, 4, 0]
    assert [plan.readers_of(stage) for stage in range(2)] == [[4, 5], [0, 1]]
    places = make_places(3, 2)
    assert [place.pipe.stage for place in places] == [2, 2, 0, 0, 1, 1]
    assert [place.exchange.rank for place in places] == [0, 1, 0, 1, 0, 1]
    assert [place.team.rank for place in places] == list(range(6))


def test_hidden_states_arrive_by_their_serials(pipes):
    first, last = pipes
    sent = [torch.randn(serial + 1, 4).bfloat16() for serial in range(num_places(2))]
    for first.serial, hidden in enumerate(sent):
        first.leave(hidden)
    for last.serial in (3, 0, 5):
        assert torch.equal(last.enter((last.serial + 1, 4), torch.bfloat16), sent[last.serial])


def test_routed_experts_come_with_them(pipes):
    first, last = pipes
    first.serial = last.serial = 0
    first.leave(torch.zeros(2, 4), torch.arange(12, dtype=torch.int32).view(2, 3, 2))
    last.enter((1, 2, 4), torch.float32)
    assert last.came.view(2, 3, 2).flatten().tolist() == list(range(12))


def test_modules_may_enter_again(pipes):
    first, last = pipes
    first.serial = last.serial = 0
    first.leave(torch.ones(2, 4))
    assert torch.equal(last.enter_module((1, 2, 4), torch.float32), last.enter_module((1, 2, 4), torch.float32))


def test_every_rank_of_the_next_stage_gets_them(make_places):
    places = make_places(2, 2)
    hidden = torch.randn(3, 4)
    for place in places[2:]:  # only the first rank of a stage writes
        place.pipe.serial = 0
        place.pipe.leave(hidden * (1 + place.exchange.rank))
    for place in places[:2]:
        place.pipe.serial = 0
        assert torch.equal(place.pipe.enter((3, 4), torch.float32), hidden)


def test_a_module_ends_at_its_last_layer(pipes):
    first, last = pipes
    first.serial = last.serial = 0
    hidden = torch.randn(1, 3, 4)
    with pytest.raises(PassedOn):
        first.finish_module(hidden)
    assert torch.equal(last.enter((1, 3, 4), torch.float32), hidden)
    with first.holding():
        first.finish_module(hidden * 2)
    assert torch.equal(first.left, hidden[0] * 2)


@pytest.mark.parametrize("breaks", ["the sender", "the receiver"])
def test_nobody_waits_for_a_stage_that_is_gone(pipes, breaks):
    first, last = pipes
    last.serial = 0
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(last.enter, (1, 4), torch.float32)
        (first if breaks == "the sender" else last).break_()
        with pytest.raises(BrokenTurnsError):
            waiting.result(10)
    with pytest.raises(BrokenTurnsError):
        first.leave(torch.zeros(1, 4))
