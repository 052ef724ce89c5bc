"""SiLU, sigmoid and softplus: right, differentiable, and the same bits wherever an element lies."""

import pytest
import torch
import torch.nn.functional as F

from rollout_engine.kernels.activation import gated_silu, sigmoid, silu, softplus

pytestmark = pytest.mark.usefixtures("side")
GATES = {sigmoid: torch.sigmoid, softplus: F.softplus}


@pytest.mark.parametrize("function", [silu, *GATES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_element_does_not_depend_on_its_place(dtype, function):
    x = (torch.randn(4096) * 4).to(dtype)
    whole = function(x)
    for length in range(1, 70):
        for offset in (0, 1, 3):
            assert torch.equal(function(x[offset : offset + length]), whole[offset : offset + length])
    assert torch.equal(function(x.view(64, 64)[:, :37]), whole.view(64, 64)[:, :37])
    assert torch.equal(function(x.view(64, 64).t()), whole.view(64, 64).t())


@pytest.mark.parametrize("function", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_and_their_gradients_are_torchs(dtype, function):
    x = torch.cat([torch.randn(300) * 4, torch.tensor([-80.0, -30.0, 0.0, 19.9, 20.1, 80.0])]).to(dtype)
    x.requires_grad_()
    mine, theirs = function(x), GATES[function](x)
    tolerance = dict(rtol=1e-6, atol=1e-30) if dtype == torch.float32 else dict(rtol=0.01, atol=0.01)
    torch.testing.assert_close(mine, theirs, **tolerance)
    (got,), (expected,) = (torch.autograd.grad(y.float().square().sum(), x) for y in (mine, theirs))
    torch.testing.assert_close(got, expected, **tolerance)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gated_form_rounds_where_two_steps_round(dtype):
    both = (torch.randn(40, 2 * 77) * 4).to(dtype)
    gate, up = both.split(77, dim=-1)
    expected = silu(gate) * up
    assert torch.equal(gated_silu(gate, up), expected)
    assert torch.equal(gated_silu(gate.contiguous(), up), expected)
    assert torch.equal(gated_silu(gate[3:4], up[3:4]), expected[3:4])
    assert torch.equal(gated_silu(gate[:, 5:9], up[:, 5:9]), expected[:, 5:9])


def test_the_gated_form_has_the_gradients_of_two_steps():
    gate, up = torch.randn(2, 6, 33, requires_grad=True)
    mine = torch.autograd.grad(gated_silu(gate, up).square().sum(), (gate, up))
    theirs = torch.autograd.grad((F.silu(gate) * up).square().sum(), (gate, up))
    for got, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, expected)


def test_what_is_not_finite_stays_so():
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    assert silu(x).tolist()[1:2] == [torch.inf]
    assert silu(x).isnan().tolist() == F.silu(x).isnan().tolist()
