"""RMSNorm: Hugging Face's formula and rounding, its gradients, and the same bits for a row wherever it lies."""

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rollout_engine.kernels.norm import offset_rms_norm, rms_norm, single_rms_norm


def _module(size, dtype):
    module = Qwen3RMSNorm(size, eps=1e-5).to(dtype)
    module.weight.data.copy_(torch.randn(size))
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 63, 64, 65, 128, 1000])
def test_it_is_hugging_faces_norm(side, dtype, size):
    module, x = _module(size, dtype), (torch.randn(50, size) * 3).to(dtype)
    got, expected = rms_norm(x, module.weight, 1e-5), module(x)
    assert got.dtype == dtype
    if dtype == torch.bfloat16:  # the same rounding points: only a sum in another order may move a value
        assert (got == expected).float().mean() > 0.99
    torch.testing.assert_close(got, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [33, 128])
def test_heads_of_a_fused_projection_are_read_in_place(dtype, size):
    weight = torch.randn(size).to(dtype)
    wide = torch.randn(2, 7, 5 * size + 3).to(dtype)
    heads = wide[..., 3 : 3 + 4 * size].view(2, 7, 4, size)
    for x in (heads, heads.transpose(1, 2), heads[:, 2:3], heads[..., ::2, :], heads[0, 0, 0]):
        got = rms_norm(x, weight, 1e-6)
        assert got.is_contiguous()
        assert torch.equal(got, rms_norm(x.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_batch_and_thread_count(thread_count, dtype):
    x, weight = torch.randn(300, 257).to(dtype), torch.randn(257).to(dtype)
    expected = rms_norm(x, weight, 1e-6)
    for threads in (1, 2):
        thread_count(threads)
        for start, end in ((0, 1), (299, 300), (3, 200), (0, 300)):
            assert torch.equal(rms_norm(x[start:end], weight, 1e-6), expected[start:end])


def test_gradients_are_those_of_the_module(side):
    module, x = _module(48, torch.float32), torch.randn(3, 5, 48, requires_grad=True)
    theirs = torch.autograd.grad(module(x).square().sum(), (x, module.weight))
    mine = torch.autograd.grad(rms_norm(x, module.weight, 1e-5).square().sum(), (x, module.weight))
    for got, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, expected)
    (only_x,) = torch.autograd.grad(rms_norm(x, module.weight.detach(), 1e-5).square().sum(), (x,))
    assert torch.equal(only_x, mine[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 33, 64, 200])
def test_gradients_are_those_of_float64(side, dtype, size):
    wide, weight = torch.randn(2, 70, 5 * size).to(dtype), torch.randn(size).to(dtype).requires_grad_()
    x = wide[..., size : 4 * size].view(2, 70, 3, size).requires_grad_()  # heads of a fused projection
    grad = torch.randn(2, 70, 3, size).to(dtype)
    mine = torch.autograd.grad(rms_norm(x, weight, 1e-5), (x, weight), grad)
    x64, weight64 = (each.detach().double().requires_grad_() for each in (x, weight))
    normal = x64 * (x64.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    wanted = torch.autograd.grad(weight64 * normal, (x64, weight64), grad)
    eps = torch.finfo(dtype).eps
    for got, expected in zip(mine, wanted, strict=True):
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), expected, rtol=4 * eps, atol=4 * eps * expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_depend_on_no_thread_count_and_those_of_a_row_on_no_batch(thread_count, dtype):
    x, weight, grad = (torch.randn(*shape, 257).to(dtype) for shape in ((300,), (), (300,)))

    def gradients(rows):
        given = x[rows].requires_grad_(), weight.clone().requires_grad_()
        return torch.autograd.grad(rms_norm(*given, 1e-6), given, grad[rows])

    of_x, of_weight = gradients(slice(None))
    for threads in (1, 2):
        thread_count(threads)
        again = gradients(slice(None))
        assert torch.equal(again[0], of_x)
        assert torch.equal(again[1], of_weight)
        for rows in (slice(0, 1), slice(299, 300), slice(3, 200)):
            assert torch.equal(gradients(rows)[0], of_x[rows])


def test_no_rows_give_no_rows(side):
    x, weight = torch.empty(0, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    out = rms_norm(x, weight, 1e-6)
    assert out.shape == (0, 8)
    of_x, of_weight = torch.autograd.grad(out.sum(), (x, weight))
    assert of_x.shape == (0, 8)
    assert torch.equal(of_weight, torch.zeros(8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 65, 128, 1000])
def test_a_norm_with_an_offset_is_gemma_s(side, dtype, size):
    module = GemmaRMSNorm(size, eps=1e-5).to(dtype)
    module.weight.data.copy_(torch.randn(size))
    x = (torch.randn(50, size) * 3).to(dtype)
    got, expected = offset_rms_norm(x, module.weight, 1e-5), module(x)
    assert got.dtype == dtype
    assert (got == expected).float().mean() > (0.99 if dtype == torch.bfloat16 else 0.3)
    torch.testing.assert_close(got, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
    for row in range(0, 50, 7):
        assert torch.equal(offset_rms_norm(x[row : row + 1], module.weight, 1e-5), got[row : row + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [15, 65, 128])
def test_a_norm_that_rounds_once_is_nemotron_s(side, dtype, size):
    module = NemotronHRMSNorm(size, eps=1e-5).to(dtype)
    module.weight.data.copy_(torch.randn(size))
    x = (torch.randn(50, size) * 3).to(dtype)
    got, expected = single_rms_norm(x, module.weight, 1e-5), module(x)
    assert got.dtype == dtype
    assert (got == expected).float().mean() > (0.99 if dtype == torch.bfloat16 else 0.3)
    torch.testing.assert_close(got, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
    for row in range(0, 50, 7):
        assert torch.equal(single_rms_norm(x[row : row + 1], module.weight, 1e-5), got[row : row + 1])
    if dtype == torch.float32:
        assert torch.equal(got, rms_norm(x, module.weight, 1e-5))
        return
    assert not torch.equal(got, rms_norm(x, module.weight, 1e-5))


def test_gradients_of_a_norm_that_rounds_once_are_those_of_its_formula(side):
    x, weight, grad = torch.randn(9, 65), torch.randn(65), torch.randn(9, 65)
    ours, plain = ([each.clone().requires_grad_() for each in (x, weight)] for _ in range(2))
    single_rms_norm(*ours, 1e-5).backward(grad)
    rms_norm(*plain, 1e-5).backward(grad)
    assert all(torch.equal(got.grad, expected.grad) for got, expected in zip(ours, plain, strict=True))


@pytest.mark.parametrize("size", [3, 65, 128])
def test_gradients_of_a_norm_with_an_offset_are_those_of_its_formula(side, size):
    x, weight, grad = torch.randn(9, 7, size), torch.randn(size), torch.randn(9, 7, size)
    ours = [each.clone().requires_grad_() for each in (x, weight)]
    offset_rms_norm(*ours, 1e-5).backward(grad)
    exact = [each.double().requires_grad_() for each in (x, weight)]
    rms = (exact[0].square().mean(-1, keepdim=True) + 1e-5).sqrt()
    ((1 + exact[1]) * exact[0] / rms).backward(grad.double())
    for got, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(got.grad.double(), expected.grad, rtol=1e-5, atol=1e-5)
