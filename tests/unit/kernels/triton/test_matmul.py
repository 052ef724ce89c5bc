"""The fixed-tile product: right, and every row the same bits however it is batched."""

import pytest
import torch
import torch.nn.functional as F

from rollout_engine.kernels.triton.matmul import Tile, matmul

DTYPES = [torch.float32, torch.bfloat16]


def _operands(rows, out_features, in_features, dtype, device):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*s, generator=g).to(device, dtype) for s in ((rows, in_features), (out_features, in_features))]


@pytest.mark.quick(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (65, 33, 130), (3, 200, 256), (130, 70, 31)], ids=str)
def test_a_product_is_its_twin_rounded_once(device, dtype, shape):
    x, weight = _operands(*shape, dtype, device)
    bias = torch.arange(shape[1], device=device).to(dtype)
    for given in (None, bias):
        out = torch.full(shape[:2], torch.nan, dtype=dtype, device=device)
        exact = F.linear(x.double(), weight.double(), None if given is None else given.double())
        ours = matmul(x, weight, given, out)
        torch.testing.assert_close(ours.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_in_any_batch(device, dtype):
    x, weight = _operands(150, 70, 300, dtype, device)
    together = matmul(x, weight, None, torch.empty(150, 70, dtype=dtype, device=device))
    for rows in (1, 2, 3, 5, 16, 17, 31, 63, 64, 65, 127, 128, 129):
        start = (11 * rows) % (151 - rows)
        part = x[start : start + rows]
        alone = matmul(part, weight, None, torch.empty(rows, 70, dtype=dtype, device=device))
        assert torch.equal(alone, together[start : start + rows]), rows


def test_rows_may_lie_apart(device):
    x, weight = _operands(6, 20, 40, torch.float32, device)
    wide = torch.full((6, 64), torch.nan, device=device)
    wide[:, 8:48] = x
    out = torch.zeros(6, 32, device=device)
    matmul(wide[:, 8:48], weight, None, out[:, 3:23])
    torch.testing.assert_close(out[:, 3:23], F.linear(x, weight))
    assert not out[:, :3].any() and not out[:, 23:].any()


def test_every_row_tile_is_computed_once_in_groups(device):
    x, weight = _operands(11 * 16 - 3, 40, 16, torch.float32, device)
    out = torch.full((len(x), 40), torch.nan, device=device)
    matmul(x, weight, None, out, Tile(16, 16, 16, 4, 2))
    torch.testing.assert_close(out, F.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_are_not_rounded_are_those_that_rounding_begins_with(device, dtype):
    x, weight = _operands(5, 33, 130, dtype, device)
    sums = matmul(x, weight, None, torch.full((5, 33), torch.nan, device=device))
    torch.testing.assert_close(sums.double(), F.linear(x.double(), weight.double()), rtol=1e-5, atol=1e-4)
    assert torch.equal(sums.to(dtype), matmul(x, weight, None, torch.empty(5, 33, dtype=dtype, device=device)))


def test_dtypes_must_agree(device):
    x, weight = _operands(2, 4, 8, torch.float32, device)
    with pytest.raises(ValueError, match="Dtypes should be equal"):
        matmul(x, weight.bfloat16(), None, torch.empty(2, 4, device=device))
