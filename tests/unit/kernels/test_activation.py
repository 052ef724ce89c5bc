"""SiLU: right, differentiable, and the same bits wherever an element lies."""

import pytest
import torch
import torch.nn.functional as F

from rollout_engine.kernels.activation import silu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_element_does_not_depend_on_its_place(dtype):
    x = (torch.randn(4096) * 4).to(dtype)
    whole = silu(x)
    for length in range(1, 70):
        for offset in (0, 1, 3):
            assert torch.equal(silu(x[offset : offset + length]), whole[offset : offset + length])
    assert torch.equal(silu(x.view(64, 64)[:, :37]), whole.view(64, 64)[:, :37])
    assert torch.equal(silu(x.view(64, 64).t()), whole.view(64, 64).t())


def test_it_is_silu_also_at_the_extremes():
    x = torch.tensor([-1e30, -100.0, -88.0, -1.0, 0.0, 1.0, 88.0, 1e30])
    torch.testing.assert_close(silu(x), F.silu(x), atol=1e-30, rtol=1e-6)


def test_its_gradient_is_silus():
    x = torch.randn(200, dtype=torch.float32, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    silu(x).square().sum().backward()
    F.silu(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    far = torch.tensor([-200.0, 200.0], requires_grad=True)
    silu(far).sum().backward()
    assert far.grad.tolist() == [0.0, 1.0]
