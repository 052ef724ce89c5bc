"""Choice of positions by an indexer, and attention over them: each query has its bits in any batch, chunk and pool."""

import numpy as np
import pytest
import torch

from rollout_engine.kernels import indexed_attention
from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.attention import Chunk, ChunkColumns
from rollout_engine.kernels.dense_attention import DenseAttention
from rollout_engine.kernels.indexed_attention import ChosenAttention, ChosenSlots, attend_chosen, choose_slots

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SCALE = 0.3


@pytest.fixture(params=["compiled", "eager"])
def kernels(request, monkeypatch):
    if request.param == "compiled" and build.load_kernels() is None:
        pytest.skip("no C++ compiler here")
    if request.param == "eager":
        monkeypatch.setattr(indexed_attention.compiled, "supports", lambda dtype: False)


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(lengths):
    """Whole sequences end to end, over a pool of their own tokens."""
    starts = np.cumsum([0, *lengths])
    return ChunkColumns.of(Chunk(0, n, list(range(s, s + n))) for s, n in zip(starts, lengths, strict=False))


@pytest.mark.quick(9)
@DTYPES
@pytest.mark.parametrize(("heads", "dim"), [(1, 5), (7, 16), (8, 33)])
def test_the_highest_scores_are_chosen(kernels, dtype, heads, dim):
    q, keys, weights = draw(150, heads, dim, dtype=dtype), draw(150, dim, dtype=dtype, seed=1), draw(150, heads, seed=2)
    chosen = choose_slots(q, weights, keys[:, None], whole([150]), topk=40, scale=SCALE)
    products = torch.einsum("thd,sd->ths", q.double(), keys.double()).relu() * SCALE
    scores = torch.einsum("th,ths->ts", weights.double(), products)
    assert chosen.counts.tolist() == [min(position + 1, 40) for position in range(150)]
    for position, count in enumerate(chosen.counts.tolist()):
        slots = chosen.slots[position].long()
        assert (slots[count:] == -1).all() and (slots[1:count] > slots[: count - 1]).all()
        others = torch.ones(position + 1, dtype=torch.bool).index_fill(0, slots[:count], False)
        if others.any():
            least, most = scores[position, slots[:count]].min(), scores[position, : position + 1][others].max()
            assert least >= most - 1e-5


def test_of_equal_scores_the_lowest_positions_are_chosen_and_nan_before_all(kernels):
    q, weights = torch.ones(9, 2, 4), torch.tensor([1.0, 1.0]).expand(9, 2)
    keys = torch.tensor([1.0, -1, -2, 3, -1, 1, 3, 1, -5])[:, None, None].expand(9, 1, 4).contiguous()
    chosen = choose_slots(q, weights, keys, whole([9]), topk=4, scale=1.0)
    assert chosen.slots[8].tolist() == [0, 3, 5, 6]
    negative = choose_slots(q, -weights, keys, whole([9]), topk=4, scale=1.0)  # scores of 0.0, and of -0.0
    assert negative.slots[8].tolist() == [1, 2, 4, 8]
    keys[7] = torch.nan
    assert choose_slots(q, weights, keys, whole([9]), topk=4, scale=1.0).slots[8].tolist() == [0, 3, 6, 7]


@pytest.mark.quick(1)
@DTYPES
def test_chunks_pools_and_threads_do_not_change_a_choice(kernels, dtype, thread_count):
    lengths, heads, dim = (130, 70), 6, 16
    q, keys = (
        draw(200, heads, dim, dtype=dtype).round(decimals=1),
        draw(200, dim, dtype=dtype, seed=1).round(decimals=1),
    )
    weights = draw(200, heads, seed=2).round(decimals=1)  # ties
    expected = choose_slots(q, weights, keys[:, None], whole(lengths), topk=20, scale=SCALE)
    blocks = torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist()
    tables = blocks[:33], blocks[33:51]
    pool = torch.full((60, 4, dim), torch.nan, dtype=dtype)
    position_of = {}
    for table, start, length in zip(tables, (0, 130), lengths, strict=True):
        for position in range(length):
            slot = table[position // 4] * 4 + position % 4
            pool.view(-1, dim)[slot], position_of[slot] = keys[start + position], start + position
    for threads, size in ((1, 1), (2, 7), (2, 64)):
        torch.set_num_threads(threads)
        for table, start, length in zip(tables, (0, 130), lengths, strict=True):
            for first in range(0, length, size):
                rows = slice(start + first, start + min(first + size, length))
                columns = ChunkColumns.of([Chunk(first, rows.stop - rows.start, table)])
                found = choose_slots(q[rows], weights[rows], pool, columns, topk=20, scale=SCALE)
                named = [[position_of[slot] for slot in row if slot >= 0] for row in found.slots.tolist()]
                assert named == [[slot for slot in row if slot >= 0] for row in expected.slots[rows].tolist()]


@DTYPES
@pytest.mark.parametrize("heads", [3, 16, 40])
def test_with_all_positions_chosen_attention_has_the_bits_of_dense_attention(kernels, dtype, heads, thread_count):
    length, size, value = 150, 40, 32
    q, keys = draw(1, heads, length, size, dtype=dtype), draw(1, 1, length, size, dtype=dtype, seed=1)
    params = AttentionParams(0.2)
    dense = DenseAttention.apply(q, keys, keys[..., :value], params)[0]
    counts = torch.arange(1, length + 1)
    slots = torch.arange(length).expand(length, -1).masked_fill(torch.arange(length) >= counts[:, None], -1).int()
    for part in (slice(0, length), slice(70, 71), slice(64, 150)):
        chosen = ChosenSlots.of(slots[part].contiguous(), counts[part], np.array([0, part.stop - part.start]))
        found, _ = attend_chosen(q[0].transpose(0, 1)[part], keys[0, 0], value, chosen, params)
        assert torch.equal(found, dense[part])


def test_attention_and_gradients_are_those_of_a_mask(kernels):
    length, heads, size, value, topk = 90, 3, 20, 12, 30
    given = [draw(length, heads, size), draw(length, size, seed=1)]
    slots = torch.full((length, topk), -1)
    mask = torch.zeros(length, length, dtype=torch.bool)
    for position in range(length):
        own = torch.randperm(position + 1, generator=torch.Generator().manual_seed(position))[:topk].sort().values
        slots[position, : len(own)], mask[position, own] = own, True
    chosen = ChosenSlots.of(slots.int(), mask.sum(1), np.array([0, length]))
    assert chosen.run_starts.tolist() == [0, *range(topk, length + 1)]
    upstream = draw(length, heads, value, seed=3)
    grads = []
    for sparse in (True, False):
        q, keys = (each.clone().requires_grad_() for each in given)
        if sparse:
            out = ChosenAttention.apply(q, keys, keys[:, :value], chosen, AttentionParams(0.2))
        else:
            scores = (torch.einsum("thd,sd->hts", q, keys) * 0.2).masked_fill(~mask, -torch.inf)
            out = torch.einsum("hts,sd->thd", scores.softmax(-1), keys[:, :value])
        out.backward(upstream)
        grads.append((out.detach(), q.grad, keys.grad))
    for found, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_columns_that_do_not_fit_are_refused():
    if build.load_kernels() is None:
        pytest.skip("no C++ compiler here")
    q, weights, keys = draw(3, 2, 4), draw(3, 2), draw(5, 1, 4)
    columns = ChunkColumns.of([Chunk(0, 3, [0, 5, 1])])
    with pytest.raises(ValueError, match=r"name a block in \[0, 5\).*not for chunk 0"):
        choose_slots(q, weights, keys, columns, topk=2, scale=1.0)
