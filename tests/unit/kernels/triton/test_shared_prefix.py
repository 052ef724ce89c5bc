"""Groups of neighbours in a batch that share a prefix."""

import numpy as np

from rollout_engine.kernels.triton.shared_prefix import shared_prefixes
from rollout_engine.kernels.triton.work import FULL_CONTEXT


def found(tables, lens, *, tokens_per_item=8, unit=32):
    """Items as (first sequence, sequences, units), and units of each sequence."""
    longest = max(map(len, tables))
    table = np.array([row + [-1] * (longest - len(row)) for row in tables], np.int32)
    shared = shared_prefixes(table, np.array(lens, np.int32), block_size=16, unit=unit, tokens_per_item=tokens_per_item)
    for item in shared.items.tolist():
        assert item == [item[0], item[0], item[2], FULL_CONTEXT, item[6] * unit, 0, item[6], 0]
    return [(item[0], item[2], item[6]) for item in shared.items.tolist()], shared.units.tolist()


def test_samples_of_one_prompt_share_its_whole_units():
    prompt = list(range(5))
    tables = [[*prompt, 10], [*prompt, 11], [*prompt, 12]]
    assert found(tables, [90, 85, 81]) == ([(0, 3, 2)], [2, 2, 2])


def test_neither_shares_the_block_that_it_writes():
    assert found([[1, 2], [1, 2]], [32, 33]) == ([], [0, 0])
    assert found([[1, 2, 3], [1, 2, 4]], [33, 33]) == ([(0, 2, 1)], [1, 1])


def test_strangers_and_a_batch_of_one_share_nothing():
    assert found([[1, 2, 3], [4, 5, 6]], [48, 48]) == ([], [0, 0])
    assert found([[1, 2, 3]], [48]) == ([], [0])


def test_a_common_system_prompt_does_not_break_up_longer_prefixes():
    system = [0, 1]
    first, second = [*system, 2, 3, 4, 5], [*system, 6, 7, 8, 9]
    tables = [[*system, 20, 21, 22, 23, 24], [*first, 30], [*first, 31], [*second, 32], [*second, 33], [*second, 34]]
    assert found(tables, [100] * 6) == ([(1, 2, 3), (3, 3, 3)], [0, 3, 3, 3, 3, 3])


def test_a_group_takes_in_who_shares_a_little_less():
    prompt = list(range(8))
    tables = [[*prompt, 10], [*prompt, 11], [*prompt[:6], 12, 13, 14]]
    assert found(tables, [140, 140, 140]) == ([(0, 3, 3)], [3, 3, 3])


def test_a_large_group_is_read_by_several_items():
    tables = [[1, 2, 10 + i] for i in range(5)]
    assert found(tables, [40] * 5, tokens_per_item=2) == ([(0, 2, 1), (2, 2, 1), (4, 1, 1)], [1] * 5)
