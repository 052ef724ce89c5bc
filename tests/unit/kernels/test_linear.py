"""Row-invariant products: the same bits for a row alone, in any batch, on one thread and two."""

import pytest
import torch

from rollout_engine.kernels import linear

SHAPES = [(64, 96), (131, 77), (384, 128), (1280, 768), (512, 2048)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_its_batch(shape, dtype, thread_count):
    weight = torch.randn(shape).to(dtype)
    bias = torch.randn(shape[0]).to(dtype)
    x = torch.randn(300, shape[1]).to(dtype)
    plan = linear.plan_for(weight)
    operand = linear.pack(weight, plan)
    thread_count(2)
    whole = linear.matmul(x, operand, bias, plan)
    for threads in (1, 2):
        thread_count(threads)
        for start, rows in [(0, 1), (5, 1), (17, 3), (0, 31), (40, 33), (100, 129), (0, 299)]:
            part = linear.matmul(x[start : start + rows], operand, bias, plan)
            assert torch.equal(part, whole[start : start + rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_product(dtype):
    weight, bias, x = torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype), torch.randn(37, 64).to(dtype)
    plan = linear.plan_for(weight)
    out = linear.matmul(x, linear.pack(weight, plan), bias, plan)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(out.double(), expected, atol=0.2 if dtype == torch.bfloat16 else 1e-4, rtol=0.02)


def test_no_rows_give_no_rows():
    weight = torch.randn(32, 64)
    plan = linear.plan_for(weight)
    assert linear.matmul(torch.empty(0, 64), linear.pack(weight, plan), None, plan).shape == (0, 32)


def test_a_shape_that_nothing_makes_invariant_is_refused(monkeypatch):
    monkeypatch.setattr(linear, "_proven", lambda *args: False)
    with pytest.raises(linear.NotInvariant, match=r"\[61, 67\]"):
        linear.plan_for(torch.randn(61, 67))


def test_the_proof_notices_a_library_that_depends_on_the_batch(monkeypatch):
    def sloppy(x, operand, bias, plan):
        return x @ operand.T + len(x) * 1e-6

    monkeypatch.setattr(linear, "_gemm", sloppy)
    weight = torch.randn(32, 64)
    plan = linear.RowPlan(linear.LIBRARY, min_rows=2, max_rows=256)
    assert not linear._holds(plan, torch.randn(320, 64), weight, [1])


def test_the_proof_leaves_the_number_of_threads_as_it_was(thread_count):
    thread_count(2)
    linear._plan.__wrapped__(45, 67, torch.float32, False)
    assert torch.get_num_threads() == 2
