"""Division of attention's work into shares."""

import numpy as np
import pytest
import torch

from rollout_engine.kernels.triton.work import WorkList
from tests.unit.kernels.triton.paged import starts_of

UNIT = 16


def filled(counts, ends, device, *, programs, tokens_per_item=1, num_kv_heads=2, is_whole=False, **how):
    work = WorkList(
        WorkList.items_needed(sum(counts), len(counts), tokens_per_item),
        tokens_per_item=tokens_per_item,
        unit=UNIT,
        num_kv_heads=num_kv_heads,
        num_programs=programs,
        is_whole=is_whole,
        device=device,
    )
    work.fill(starts_of(counts, device), torch.tensor(ends, dtype=torch.int32, device=device), **how)
    return work


def items_of(work):
    """[num_items, 7] of ints."""
    return work.items[: int(work.num_items), :7].tolist()


def line_of(work):
    """(item, head, unit) of every place in the line."""
    heads = range(work.num_kv_heads)
    items = enumerate(items_of(work))
    return [(i, head, unit) for i, item in items for head in heads for unit in range(item[5], item[6])]


def test_a_chunk_becomes_items_of_so_many_tokens(device):
    work = filled([1, 7, 3], [40, 20, 3], device, programs=3, tokens_per_item=3)
    assert items_of(work) == [
        # sequence, first token, tokens, position, end, units
        [0, 0, 1, 39, 40, 0, 3],
        [1, 1, 3, 13, 16, 0, 1],
        [1, 4, 3, 16, 19, 0, 2],
        [1, 7, 1, 19, 20, 0, 2],
        [2, 8, 3, 0, 3, 0, 1],
    ]


def test_padding_comes_to_nothing_wherever_it_is(device):
    work = filled([1, 1, 1], [20, 0, 33], device, programs=3)
    assert [item[0] for item in items_of(work)] == [0, 2]
    assert int(work.line[0]) == 2 * (2 + 3)


def test_sequences_may_begin_further_down_the_block_tables(device):
    assert [item[0] for item in items_of(filled([1, 3], [20, 9], device, programs=3, first_sequence=4))] == [4, 5, 5, 5]


def test_units_that_no_token_sees_are_left_out(device):
    work = filled([1, 4], [100, 40], device, programs=3, tokens_per_item=2, sliding_window=20)
    assert [item[5:] for item in items_of(work)] == [[5, 7], [1, 3], [1, 3]]


def test_a_prefix_that_others_read_is_left_out(device):
    units = torch.tensor([2, 0], dtype=torch.int32, device=device)
    work = filled([1, 1], [60, 60], device, programs=3, prefix_units=units)
    assert [item[5:] for item in items_of(work)] == [[2, 4], [0, 4]]


@pytest.mark.quick(1)
@pytest.mark.parametrize("programs", [1, 3, 16, 50])
def test_shares_are_equal_and_cover_the_line_once(programs, device):
    ends = [2000, *np.random.default_rng(0).integers(1, 60, 9).tolist()]
    work = filled([1] * 10, ends, device, programs=programs)
    line = line_of(work)
    total, chunk = work.line.tolist()
    assert (total, chunk) == (len(line), -(-len(line) // programs))
    items, starts = work.shares.T.tolist()
    assert starts == [min(program * chunk, total) for program in range(programs + 1)]
    assert items == [line[start][0] if start < total else 10 for start in starts]


@pytest.mark.parametrize("programs", [1, 4, 30])
def test_shares_of_a_whole_list_end_with_a_head(programs, device):
    work = filled([9, 1, 30], [50, 70, 90], device, programs=programs, tokens_per_item=4, is_whole=True)
    line = line_of(work)
    items, starts = work.shares.T.tolist()
    begins = {i for i, (item, head, _) in enumerate(line) if not i or line[i - 1][:2] != (item, head)}
    assert set(starts) <= begins | {len(line)}
    assert (starts[0], starts[-1]) == (0, len(line)) and starts == sorted(starts)
    assert items == [line[start][0] if start < len(line) else int(work.num_items) for start in starts]


def test_more_items_than_are_looked_at_together(device):
    work = filled([1500], [1500], device, programs=5, num_kv_heads=1)
    line = line_of(work)
    total, chunk = work.line.tolist()
    assert total == len(line)
    assert work.shares[:, 0].tolist() == [line[p * chunk][0] if p * chunk < total else 1500 for p in range(6)]
    units_before = np.cumsum([0] + [item[6] for item in items_of(work)])[:-1]
    assert work.items[:, 7].tolist() == units_before.tolist()
