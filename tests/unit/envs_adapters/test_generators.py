"""Random generators that are lent."""

import random

import numpy as np
import pytest

from envs_adapters.generators import OwnGenerators


def drawn():
    return random.random(), np.random.random()


def test_blocks_go_on_where_the_last_one_ended_whoever_draws_in_between():
    random.seed(5)
    np.random.seed(5)
    expected = [drawn() for _ in range(3)]
    one, other = OwnGenerators(5), OwnGenerators(6)
    seen = []
    for _ in range(3):
        with one:
            seen.append(drawn())
        with other:
            drawn()
        drawn()
    assert seen == expected


def test_outside_the_blocks_the_generators_are_as_without_them():
    random.seed(1)
    np.random.seed(1)
    expected = [drawn(), drawn()]
    random.seed(1)
    np.random.seed(1)
    seen = [drawn()]
    with pytest.raises(ZeroDivisionError), OwnGenerators(2):
        drawn()
        raise ZeroDivisionError
    assert [*seen, drawn()] == expected
    with OwnGenerators(2):
        drawn()
