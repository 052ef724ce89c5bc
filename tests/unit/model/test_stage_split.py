"""Layers are divided among stages by what they cost and what they hold."""

import random
from itertools import combinations, pairwise

import pytest

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.ranks.stage_split import split_layers


def held_by(stages, layers, embedding, head):
    found = [sum(layers[index] for index in stage) for stage in stages]
    found[0] += embedding
    found[-1] += head
    return found


def test_equal_layers_are_divided_evenly():
    assert split_layers([10] * 8, embedding=0, head=0, num_stages=4) == [
        range(0, 2),
        range(2, 4),
        range(4, 6),
        range(6, 8),
    ]


def test_a_head_costs_as_layers_do_and_an_embedding_does_not():
    assert split_layers([10] * 8, embedding=0, head=40, num_stages=2) == [range(0, 6), range(6, 8)]
    assert split_layers([10] * 8, embedding=12, head=0, num_stages=2) == [range(0, 4), range(4, 8)]


def test_no_stage_of_two_holds_more_than_six_tenths_if_that_is_possible():
    layers = [16] * 28
    stages = split_layers(layers, embedding=155, head=155, num_stages=2)
    held = held_by(stages, layers, 155, 155)
    assert max(held) <= 0.6 * sum(held)


@pytest.mark.parametrize("seed", range(30))
def test_the_division_is_the_best_of_all(seed):
    rng = random.Random(seed)
    layers = [rng.randint(1, 50) for _ in range(rng.randint(2, 9))]
    num_stages = rng.randint(1, len(layers))
    embedding, head = rng.randint(0, 100), rng.randint(0, 100)
    stages = split_layers(layers, embedding=embedding, head=head, num_stages=num_stages)
    assert [index for stage in stages for index in stage] == list(range(len(layers))) and all(stages)
    every = []
    for cuts in combinations(range(1, len(layers)), num_stages - 1):
        every.append([range(*pair) for pair in pairwise([0, *cuts, len(layers)])])
    least = min(max(held_by(each, layers, embedding, head)) for each in every)
    most = max(least, int(1.2 * (sum(layers) + embedding + head) / num_stages))
    allowed = [each for each in every if max(held_by(each, layers, embedding, head)) <= most]
    assert stages in allowed
    best = min(max(held_by(each, layers, 0, head)) for each in allowed)
    assert max(held_by(stages, layers, 0, head)) == best


def test_layers_that_read_keys_of_another_stay_with_it():
    stages = split_layers([10] * 6, embedding=0, head=0, num_stages=2, joined=(2, 3, 4))
    assert stages in ([range(0, 1), range(1, 6)], [range(0, 5), range(5, 6)])
    with pytest.raises(ConfigError, match="pipeline_parallel_size=5 is too many: .* at 2 places. Give 3 at most"):
        split_layers([10] * 6, embedding=0, head=0, num_stages=5, joined=(2, 3, 4))
