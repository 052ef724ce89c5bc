"""Low-rank adapters: their formula, gradients, and the same bits for a row whatever else is in the batch."""

import pytest
import torch

from rollout_engine.kernels.adapters import AdapterPair, AdapterRows, AdapterTable, add_adapter, add_adapters
from rollout_engine.kernels.cpu import build

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def _table(dtype, in_features=67, sizes=(48, 33), ranks=(3, 16, 40)):
    """One adapter of each rank; the second has nothing for the last linear."""
    table = AdapterTable(len(ranks), in_features, sizes, dtype)
    for slot, rank in enumerate(ranks):
        pairs = [
            AdapterPair.packed(torch.randn(rank, in_features), torch.randn(size, rank), 0.5 + slot, dtype)
            for size in sizes
        ]
        table.set(slot, pairs if slot != 1 else [*pairs[:-1], None])
    return table


def _added(table, x, out, slots):
    result = out.clone()
    plan = AdapterRows.of(slots, [1] * len(slots))
    if plan is not None:
        add_adapters(table, x, result, plan)
    return result


def _expected(table, x, out, slots):
    result = out.double()
    for row, slot in enumerate(slots):
        column = 0
        for size, pair in zip(table.sizes, table.pairs[slot] if slot >= 0 else (), strict=False):
            if pair is not None:
                wide, tall = pair.matrices(size)
                result[row, column : column + size] += x[row].double() @ wide.double() @ tall.double() * pair.scale
            column += size
    return result


@DTYPES
def test_each_row_gets_its_own_adapter(side, dtype):
    table = _table(dtype)
    x, out = torch.randn(23, 67).to(dtype), torch.randn(23, 81).to(dtype)
    slots = [(7 * row) % 4 - 1 for row in range(23)]
    got = _added(table, x, out, slots)
    tolerance = dict(rtol=1e-2, atol=1e-1) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(got.double(), _expected(table, x, out, slots), **tolerance)
    without = torch.tensor(slots) < 0
    assert torch.equal(got[without], out[without])
    second = torch.tensor(slots) == 1
    assert torch.equal(got[second, 48:], out[second, 48:])
    assert not torch.equal(got[second, :48], out[second, :48])


@DTYPES
def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch(side, thread_count, dtype):
    table = _table(dtype)
    x, out = torch.randn(40, 67).to(dtype), torch.randn(40, 81).to(dtype)
    alone = torch.cat([_added(table, x[i : i + 1], out[i : i + 1], [i % 3]) for i in range(40)])
    for threads in (1, 2):
        thread_count(threads)
        for start, end in ((0, 40), (3, 20), (7, 9), (39, 40)):
            slots = [row % 3 for row in range(start, end)]
            assert torch.equal(_added(table, x[start:end], out[start:end], slots), alone[start:end])
    sorted_rows = torch.tensor([row for slot in range(3) for row in range(40) if row % 3 == slot])
    slots = [row % 3 for row in sorted_rows.tolist()]
    assert torch.equal(_added(table, x[sorted_rows], out[sorted_rows], slots), alone[sorted_rows])


@DTYPES
def test_the_kernel_and_its_twin_agree(dtype, monkeypatch):
    if build.load_kernels() is None:
        pytest.skip("no compiler")
    table = _table(dtype)
    x, out = torch.randn(23, 67).to(dtype), torch.randn(23, 81).to(dtype)
    slots = [row % 4 - 1 for row in range(23)]
    compiled = _added(table, x, out, slots)
    monkeypatch.setattr(build, "load_kernels", lambda: None)
    torch.testing.assert_close(compiled, _added(table, x, out, slots), rtol=1e-2, atol=1e-3)


@DTYPES
def test_wide_linears_are_computed_in_pieces(side, dtype):
    sizes = (300, 70, 520)
    table = _table(dtype, 600, sizes)
    x, out = torch.randn(11, 600).to(dtype) / 5, torch.randn(11, sum(sizes)).to(dtype)
    slots = [row % 4 - 1 for row in range(11)]
    tolerance = dict(rtol=1e-2, atol=1e-1) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(_added(table, x, out, slots).double(), _expected(table, x, out, slots), **tolerance)


def test_rows_apart_in_memory_are_read_and_written_in_place():
    table = _table(torch.float32)
    x, wide = torch.randn(6, 100), torch.randn(6, 200)
    expected = _added(table, x[:, :67].contiguous(), wide[:, 9:90].contiguous(), [0, 1, 2] * 2)
    before = wide.clone()
    add_adapters(table, x[:, :67], wide[:, 9:90], AdapterRows.of([0, 1, 2] * 2, [1] * 6))
    assert torch.equal(wide[:, 9:90], expected)
    assert torch.equal(wide[:, :9], before[:, :9]) and torch.equal(wide[:, 90:], before[:, 90:])


def test_runs_of_rows_are_divided_into_blocks_of_one_adapter():
    plan = AdapterRows.of([-1, 1, 0, 1], [3, 5, 2, 1])
    assert plan.rows.tolist() == [8, 9, 3, 4, 5, 6, 7, 10]
    assert plan.blocks.tolist() == [[0, 2, 0], [2, 4, 1], [6, 2, 1]]
    assert AdapterRows.of([-1, -1], [3, 2]) is None


@DTYPES
def test_the_trainers_product_has_the_engines_bits(side, dtype):
    a, b = torch.randn(12, 67), torch.randn(48, 12)
    x, out = torch.randn(9, 67).to(dtype), torch.randn(9, 48).to(dtype)
    table = AdapterTable(2, 67, [48], dtype)
    table.set(1, [AdapterPair.packed(a, b, 1.5, dtype)])
    expected = _added(table, x, out, [1] * 9)
    assert torch.equal(add_adapter(x, out, a, b, 1.5), expected)
    assert torch.equal(add_adapter(x, out, a.requires_grad_(), b, 1.5).detach(), expected)


def test_gradients_are_those_of_the_plain_formula(side):
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((9, 20), (9, 30), (4, 20), (30, 4))]
    x, out, a, b = leaves
    plain = torch.autograd.grad((out + 0.7 * x @ a.t() @ b.t()).square().sum(), leaves)
    mine = torch.autograd.grad(add_adapter(x, out, a, b, 0.7).square().sum(), leaves)
    for got, expected in zip(mine, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "a, b",
    [((1, 66, 16), (2, 16, 32)), ((1, 67, 16), (1, 16, 32)), ((1, 67, 16), (2, 12, 32)), ((1, 67, 12), (2, 16, 32))],
    ids=["other inputs", "other outputs", "another rank", "a rank that is not padded"],
)
def test_matrices_that_do_not_fit_are_refused(a, b):
    table = _table(torch.float32)
    pair = AdapterPair.packed(torch.zeros(1, 1), torch.zeros(1, 1), 1.0, torch.float32)._replace(
        a=torch.zeros(a), b=torch.zeros(b)
    )
    with pytest.raises(ValueError, match="should be"):
        table.set(0, [pair, None])


def test_rows_beyond_the_batch_are_refused():
    table = _table(torch.float32)
    with pytest.raises(ValueError, match="more than 6 rows"):
        table.add(torch.zeros(6, 67), torch.zeros(6, 81), AdapterRows.of([0], [7]))


@pytest.mark.parametrize("rank", [3, 16])
def test_matrices_are_copies(rank):
    a, b = torch.randn(20, rank).t(), torch.randn(rank, 30).t()
    pair = AdapterPair.packed(a, b, 1.0, torch.float32)
    before = pair.a.clone(), pair.b.clone()
    a.zero_(), b.zero_()
    assert torch.equal(pair.a, before[0]) and torch.equal(pair.b, before[1])
