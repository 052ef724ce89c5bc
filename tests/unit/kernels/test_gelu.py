"""GELU's tanh form: right, differentiable, and the same bits wherever an element lies."""

import pytest
import torch
import torch.nn.functional as F

from rollout_engine.kernels.activation import gelu_tanh


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_element_does_not_depend_on_its_place(dtype):
    x = (torch.randn(4096) * 4).to(dtype)
    whole = gelu_tanh(x)
    for length in range(1, 70):
        for offset in (0, 1, 3):
            assert torch.equal(gelu_tanh(x[offset : offset + length]), whole[offset : offset + length])
    assert torch.equal(gelu_tanh(x.view(64, 64).t()), whole.view(64, 64).t())


def test_it_is_gelu_also_at_the_extremes():
    x = torch.cat([torch.linspace(-9, 9, 1001), torch.tensor([-1e30, -100.0, 0.0, 100.0, 1e30])])
    torch.testing.assert_close(gelu_tanh(x), F.gelu(x, approximate="tanh"), atol=1e-6, rtol=1e-6)
    assert gelu_tanh(torch.tensor([torch.nan, torch.inf])).tolist()[1] == torch.inf


def test_its_gradient_is_gelus():
    x = (torch.randn(500) * 3).requires_grad_()
    y = x.detach().clone().requires_grad_()
    gelu_tanh(x).square().sum().backward()
    F.gelu(y, approximate="tanh").square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, atol=1e-5, rtol=1e-5)
