"""Products by int8 codes: against a rounding and a product in numpy, and the same bits for a row at any place."""

import numpy as np
import pytest
import torch

from rollout_engine.kernels import linear
from rollout_engine.kernels.cpu import build, gemm, int8
from tests.unit.kernels.test_cpu_gemm import DTYPES, SHAPES, WINDOWS

pytestmark = pytest.mark.skipif(build.load_kernels() is None, reason="no C++ compiler")


def rounded(weight):
    """The codes int8 [N, K] and scales float32 [N] that the module describes, by numpy."""
    values = weight.float().numpy()
    largest = np.abs(values).max(axis=1)
    codes = np.rint(values * (np.float32(127) / largest)[:, None])
    return np.clip(codes, -127, 127).astype(np.int8), largest / np.float32(127)


def codes_of(packed):
    """The codes int8 [N, K] of a packed weight."""
    panels, units, _ = packed.panels.shape
    by_row = packed.panels.view(panels, units, gemm.PANEL, -1).permute(0, 2, 1, 3).reshape(panels * gemm.PANEL, -1)
    padding = by_row.clone()
    padding[: packed.out_features, : packed.in_features] = 0
    assert not padding.any() and not packed.scales[packed.out_features :].any()
    return by_row[: packed.out_features, : packed.in_features].numpy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_the_nearest_on_any_number_of_threads(dtype, shape, thread_count):
    weight = torch.randn(shape).to(dtype)
    codes, scales = rounded(weight)
    for threads in (1, 3):
        thread_count(threads)
        packed = int8.pack(weight)
        assert np.array_equal(codes_of(packed), codes) and np.array_equal(packed.scales[: shape[0]].numpy(), scales)
    errors = np.abs(codes * scales[:, None].astype(np.float64) - weight.double().numpy())
    assert (errors <= scales[:, None] * (0.5 + 1e-4)).all()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_product_by_codes_times_scales(dtype, shape, with_bias):
    weight, x = torch.randn(shape).to(dtype), torch.randn(70, shape[1]).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if with_bias else None
    codes, scales = rounded(weight)
    expected = x.double().numpy() @ (codes * scales[:, None].astype(np.float64)).T
    expected = torch.from_numpy(expected) + (0 if bias is None else bias.double())
    tolerance = {"rtol": 2**-8, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(gemm.matmul(x, int8.pack(weight), bias).double(), expected, **tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_in_any_batch_on_any_number_of_threads(dtype, shape, thread_count):
    weight, bias, x = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype), torch.randn(70, shape[1]).to(dtype)
    operand = int8.pack(weight)
    whole = gemm.matmul(x, operand, bias)
    for threads in (1, 2, 3):
        thread_count(threads)
        for start, rows in WINDOWS:
            part = gemm.matmul(x[start : start + rows], operand, bias)
            assert torch.equal(part, whole[start : start + rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_in_blocks_of_any_height(dtype):
    weight, x = torch.randn(70, 300).to(dtype), torch.randn(260, 300).to(dtype)
    operand = int8.pack(weight)
    whole = gemm.matmul(x, operand, None)
    for rows in (*range(1, 66), 127, 128, 129, 259):
        assert torch.equal(gemm.matmul(x[:rows], operand, None), whole[:rows])
        assert torch.equal(gemm.matmul(x[-rows:], operand, None), whole[-rows:])


def test_rows_beyond_the_cache_are_cut_into_parts_with_the_same_bits(thread_count):
    weight, x = torch.randn(40, 2048).to(torch.bfloat16), torch.randn(700, 2048).to(torch.bfloat16)
    operand = int8.pack(weight)
    thread_count(2)
    whole = gemm.matmul(x, operand, None)
    assert torch.equal(torch.cat([gemm.matmul(part, operand, None) for part in x.split(100)]), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_zeros_or_nearly_so_gives_zeros_and_no_other_row_changes(dtype):
    weight, x = torch.randn(40, 50).to(dtype), torch.randn(3, 50).to(dtype)
    clean = gemm.matmul(x, int8.pack(weight), None)
    weight[7], weight[33] = 0, 1e-37
    found = gemm.matmul(x, int8.pack(weight), None)
    assert not found[:, [7, 33]].any()
    clean[:, [7, 33]] = 0
    assert torch.equal(found, clean)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_makes_its_own_output_nan(dtype, bad):
    weight, x = torch.randn(70, 48).to(dtype), torch.randn(20, 48).to(dtype)
    clean = gemm.matmul(x, int8.pack(weight), None)
    weight[66, 3] = bad
    spoilt = gemm.matmul(x, int8.pack(weight), None)
    assert spoilt[:, 66].isnan().all()
    others = torch.arange(70) != 66
    assert torch.equal(spoilt[:, others], clean[:, others])


def test_inputs_may_be_slices_and_codes_take_a_quarter_or_half():
    tall, x = torch.randn(64, 96), torch.randn(5, 64)
    weight = tall[:, 3:67]
    assert torch.equal(gemm.matmul(x, int8.pack(weight), None), gemm.matmul(x, int8.pack(weight.clone()), None))
    for dtype in DTYPES:
        plain, codes = gemm.pack(weight.to(dtype)), int8.pack(weight.to(dtype))
        assert codes.panels.nbytes * dtype.itemsize == plain.panels.nbytes


def test_codes_without_their_scales_or_of_another_shape_are_refused():
    packed, x = int8.pack(torch.randn(40, 50)), torch.randn(2, 50)
    for wrong in (
        packed._replace(scales=None),
        packed._replace(scales=packed.scales[:32]),
        packed._replace(scales=packed.scales.double()),
        packed._replace(panels=packed.panels[:1]),
        packed._replace(panels=packed.panels.int()),
    ):
        with pytest.raises(ValueError, match="should be"):
            gemm.matmul(x, wrong, None)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        int8.pack(torch.randn(4, 4).half())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plan_is_proven_for_codes_and_packs_them(dtype):
    weight, x = torch.randn(45, 67).to(dtype), torch.randn(9, 67).to(dtype)
    plan = linear.plan_for(weight, as_int8=True)
    assert plan == linear.RowPlan(linear.OWN, 0, plan.max_rows, int8=True)
    expected = gemm.matmul(x, int8.pack(weight), None)
    assert torch.equal(linear.matmul(x, linear.pack(weight, plan), None, plan), expected)
    assert not linear.plan_for(weight).int8


def test_without_a_kernel_for_the_dtype_there_is_no_such_plan():
    with pytest.raises(linear.NotInvariant):
        linear.plan_for(torch.zeros(4, 4, dtype=torch.float16), as_int8=True)
