"""Norms and activations in Triton against their eager twins."""

import pytest
import torch

from rollout_engine.kernels.activation import gated_silu, gelu_tanh
from rollout_engine.kernels.norm import rms_norm as eager_norm
from rollout_engine.kernels.triton.activation import gated
from rollout_engine.kernels.triton.norm import add_rms_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16]
EPSILON = 1e-6
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of the interpreter


def _random(*shape, dtype, device, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _assert_close(ours, twins):
    """Equal up to the last bit of a rounding, or to the accuracy of a device's `exp`."""
    torch.testing.assert_close(ours, twins, rtol=max(2 * torch.finfo(twins.dtype).eps, 4e-6), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 63, 2049])
def test_a_gated_activation_is_its_twin(device, dtype, size):
    buffer = _random(3, 2 * size, dtype=dtype, device=device) * 4
    gate, up = buffer.split(size, dim=1)
    out = torch.full((3, size), torch.nan, dtype=dtype, device=device)
    _assert_close(gated(gate, up, out), gated_silu(gate, up))
    _assert_close(gated(gate, up, out, "gelu_tanh"), gelu_tanh(gate) * up)


def test_a_gated_activation_saturates(device):
    gate = torch.tensor([[-1e30, -200.0, -0.0, 200.0, 1e30]], device=device)
    ones = torch.ones_like(gate)
    expected = torch.tensor([[0.0, 0.0, 0.0, 200.0, 1e30]], device=device)
    assert torch.equal(gated(gate, ones, torch.empty_like(gate)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 96, 1000, 2500])
def test_a_norm_is_its_twin(device, dtype, size):
    x, weight = _random(5, size, dtype=dtype, device=device) * 3, _random(size, dtype=dtype, device=device, seed=1)
    _assert_close(rms_norm(x, weight, EPSILON, torch.empty_like(x)), eager_norm(x, weight, EPSILON))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_takes_heads_inside_a_wider_buffer_and_may_overwrite_them(device, dtype):
    buffer = _random(4, 5 * 96, dtype=dtype, device=device)
    heads = buffer.view(4, 5, 96)[:, 1:4]
    weight = _random(96, dtype=dtype, device=device, seed=1)
    before = buffer.clone()
    expected = eager_norm(heads, weight, EPSILON)
    _assert_close(rms_norm(heads, weight, EPSILON, heads), expected)
    assert torch.equal(buffer[:, :96], before[:, :96]) and torch.equal(buffer[:, 384:], before[:, 384:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_after_a_sum_leaves_the_rounded_sum(device, dtype):
    residual, delta = (_random(7, 300, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    weight, total = _random(300, dtype=dtype, device=device, seed=2), residual + delta
    out = add_rms_norm(residual, delta, weight, EPSILON, delta)
    assert torch.equal(residual, total)
    assert torch.equal(out, rms_norm(total, weight, EPSILON, torch.empty_like(total)))
    _assert_close(out, eager_norm(total, weight, EPSILON))


@pytest.mark.parametrize("size", [96, 2500])
def test_a_row_of_a_norm_is_the_same_bits_in_any_batch(device, size):
    x = _random(41, size, dtype=torch.float32, device=device)
    weight = _random(size, dtype=torch.float32, device=device, seed=1)
    together = rms_norm(x, weight, EPSILON, torch.empty_like(x))
    for rows in (slice(0, 1), slice(40, 41), slice(3, 30)):
        alone = rms_norm(x[rows], weight, EPSILON, torch.empty_like(x[rows]))
        assert torch.equal(alone, together[rows])


def test_no_rows_are_no_work(device):
    x, weight = torch.empty(0, 8, device=device), torch.ones(8, device=device)
    assert rms_norm(x, weight, EPSILON, x).shape == gated(x, x, x).shape == (0, 8)


def test_rows_must_be_contiguous(device):
    x, weight = torch.zeros(4, 8, device=device).T, torch.ones(4, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(x, weight, EPSILON, x)
    with pytest.raises(ValueError, match="contiguous"):
        gated(x, x, x)
