"""Low-rank adapters on a device: their formula, and the same bits for a row whatever else is in the batch."""

import pytest
import torch

from rollout_engine.kernels import adapters as on_host
from rollout_engine.kernels.cpu.adapters import AdapterRows
from rollout_engine.kernels.triton.adapters import BLOCK_ROWS, AdapterBatch, AdapterPair, AdapterTable, added

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SIZES = 48, 75


def _table(dtype, device, in_features=67, sizes=SIZES, ranks=(3, 16, 40)):
    """One adapter of each rank; the second has nothing for the last linear."""
    table, generator = AdapterTable(len(ranks), in_features, sizes, dtype, device), torch.Generator().manual_seed(0)
    for slot, rank in enumerate(ranks):
        matrices = [
            [torch.randn(rank, in_features, generator=generator), torch.randn(size, rank, generator=generator)]
            for size in sizes
        ]
        pairs = [AdapterPair.packed(a, b, 0.5 + slot, dtype).to(device) for a, b in matrices]
        table.set(slot, pairs if slot != 1 else [*pairs[:-1], None])
    return table


def _rows(count, width, dtype, device, seed=1):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _added(table, x, out, slots):
    result = out.clone()
    plan = AdapterRows.of(slots, [1] * len(slots), BLOCK_ROWS)
    if plan is not None:
        table.add(x, result, AdapterBatch.of(plan, x.device))
    return result


def _expected(table, x, out, slots):
    result = out.double()
    for row, slot in enumerate(slots):
        column = 0
        for size, pair in zip(table.sizes, table.pairs[slot] if slot >= 0 else (), strict=False):
            if pair is not None:
                delta = x[row].double() @ pair.a.double().T @ pair.b.double().T
                result[row, column : column + size] += delta * pair.scale
            column += size
    return result


@DTYPES
def test_each_row_gets_its_own_adapter(device, dtype):
    table = _table(dtype, torch.device(device))
    x, out = _rows(23, 67, dtype, device), _rows(23, sum(SIZES), dtype, device, seed=2)
    slots = [(7 * row) % 4 - 1 for row in range(23)]
    got = _added(table, x, out, slots)
    tolerance = dict(rtol=1e-2, atol=1e-1) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(got.double(), _expected(table, x, out, slots), **tolerance)
    without, second = torch.tensor(slots) < 0, torch.tensor(slots) == 1
    assert torch.equal(got[without], out[without])
    assert torch.equal(got[second, 48:], out[second, 48:])
    assert not torch.equal(got[second, :48], out[second, :48])


@pytest.mark.quick(1)
@DTYPES
def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch(device, dtype):
    table = _table(dtype, torch.device(device))
    x, out = _rows(40, 67, dtype, device), _rows(40, sum(SIZES), dtype, device, seed=2)
    together = _added(table, x, out, [0] * 40)
    for start, end in ((0, 1), (3, 20), (7, 9), (17, 40), (39, 40)):
        slots = [0] * (end - start)
        assert torch.equal(_added(table, x[start:end], out[start:end], slots), together[start:end])
    mixed = _added(table, x, out, [row % 3 for row in range(40)])
    assert torch.equal(mixed[::3], together[::3])


def test_one_linear_alone_has_the_bits_that_it_has_beside_others(device):
    """The engine adds q, k and v at once, a trainer's module each by itself."""
    table = _table(torch.bfloat16, torch.device(device))
    x, out = _rows(5, 67, torch.bfloat16, device), _rows(5, sum(SIZES), torch.bfloat16, device, seed=2)
    together = _added(table, x, out, [0] * 5)
    for pair, columns in zip(table.pairs[0], (slice(0, 48), slice(48, None)), strict=True):
        assert torch.equal(added(x, out[:, columns], pair.a[:3], pair.b[:, :3], pair.scale), together[:, columns])


def test_rows_may_lie_apart_and_adapters_come_and_go(device):
    table = _table(torch.float32, torch.device(device))
    x, out = _rows(6, 67, torch.float32, device), _rows(6, sum(SIZES), torch.float32, device, seed=2)
    wide_x, wide_out = torch.full((6, 80), torch.nan, device=device), torch.full((6, 160), torch.nan, device=device)
    wide_x[:, 5:72], wide_out[:, 9 : 9 + sum(SIZES)] = x, out
    slots = [2, 0, 2, -1, 1, 0]
    plan = AdapterBatch.of(AdapterRows.of(slots, [1] * 6, BLOCK_ROWS), torch.device(device))
    table.add(wide_x[:, 5:72], wide_out[:, 9 : 9 + sum(SIZES)], plan)
    assert torch.equal(wide_out[:, 9 : 9 + sum(SIZES)], _added(table, x, out, slots))
    assert wide_out[:, :9].isnan().all() and wide_out[:, 9 + sum(SIZES) :].isnan().all()
    table.set(2, [None, None])
    assert torch.equal(_added(table, x, out, [2] * 6), out)
    table.set(0, [None, None])
    table.set(1, [None, None])
    assert torch.equal(_added(table, x, out, slots), out)


def test_gradients_are_those_of_the_formula(device):
    x, out = _rows(7, 20, torch.float32, device), _rows(7, 12, torch.float32, device, seed=2)
    a, b = _rows(4, 20, torch.float32, device, seed=3), _rows(12, 4, torch.float32, device, seed=4)
    given = [each.requires_grad_() for each in (x, out, a, b)]
    result = on_host.add_adapter(*given, 1.5, kernel=added)
    result.square().sum().backward()
    found, same = [each.grad.clone() for each in given], [each.detach().requires_grad_() for each in given]
    (same[1] + 1.5 * same[0] @ same[2].T @ same[3].T).square().sum().backward()
    for ours, other in zip(found, same, strict=True):
        torch.testing.assert_close(ours, other.grad, rtol=1e-4, atol=1e-4)


def test_matrices_of_another_shape_are_refused(device):
    table = AdapterTable(1, 32, [16], torch.float32, torch.device(device))
    pair = AdapterPair.packed(torch.zeros(4, 32), torch.zeros(17, 4), 1.0, torch.float32).to(torch.device(device))
    with pytest.raises(ValueError, match=r"b should be torch.float32 \[16, 16\].*got torch.float32 \[17, 16\]"):
        table.set(0, [pair])
