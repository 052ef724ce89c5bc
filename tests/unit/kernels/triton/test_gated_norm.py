"""Norms of layers that keep a state, on a device: those of the twins, and rows do not depend on one another."""

import itertools

import pytest
import torch

from rollout_engine.kernels.norm import gated_rms_norm, offset_rms_norm
from rollout_engine.kernels.triton.gated_norm import gated_norm
from rollout_engine.kernels.triton.norm import add_rms_norm, rms_norm

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
# Of the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


def draw(device, dtype, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_alike(ours, twins):
    """Equal up to the last bit of each rounding, or to the accuracy of a device's `exp`."""
    assert ours.dtype is twins.dtype
    torch.testing.assert_close(ours, twins, rtol=max(4 * torch.finfo(twins.dtype).eps, 8e-6), atol=2e-6)


@pytest.mark.quick(2)
@DTYPES
@pytest.mark.parametrize(("size", "group_size"), [(12, 12), (96, 32), pytest.param(2500, 2500, marks=pytest.mark.slow)])
def test_a_gated_norm_is_its_twin(device, dtype, size, group_size):
    x, weight = draw(device, dtype, 2, 3, size), draw(device, dtype, size, seed=2)
    for gate_first, activation, rounds in itertools.product((False, True), ("silu", "sigmoid"), (True, False)):
        options = {"group_size": group_size, "gate_first": gate_first, "activation": activation, "rounds_norm": rounds}
        for other in (dtype, torch.float32):
            gate = draw(device, other, 2, 3, size, seed=1) * 3
            ours = gated_rms_norm(x, gate, weight, 1e-6, **options, kernel=gated_norm)
            assert_alike(ours, gated_rms_norm(x, gate, weight, 1e-6, **options))


def test_rows_of_a_gated_norm_do_not_depend_on_one_another(device):
    wide, weight = draw(device, torch.float32, 50, 2 * 24), draw(device, torch.float32, 24, seed=1)
    x, gate = wide.split(24, 1)  # rows far from one another
    options = {"group_size": 8, "gate_first": True, "is_sigmoid": False, "rounds_norm": True}
    together = gated_norm(x, gate, weight, 1e-6, **options)
    for rows in (slice(0, 1), slice(3, 45), slice(49, 50)):
        assert torch.equal(gated_norm(x[rows], gate[rows], weight, 1e-6, **options), together[rows])
    assert gated_norm(x[:0], gate[:0], weight, 1e-6, **options).shape == (0, 24)


@pytest.mark.parametrize("gate_first", [False, True])
def test_gradients_are_those_of_the_twin(device, gate_first):
    given = [draw(device, torch.float32, *shape, seed=shape[0]) for shape in ((5, 12), (5, 12), (12,))]
    grad, found = draw(device, torch.float32, 5, 12, seed=9), []
    for kernel in (gated_norm, None):
        leaves = [x.clone().requires_grad_() for x in given]
        out = gated_rms_norm(*leaves, 1e-6, group_size=6, gate_first=gate_first, kernel=kernel)
        found.append(torch.autograd.grad(out, leaves, grad))
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right)


def offset_norm(x, weight):
    return rms_norm(x, weight, 1e-6, torch.empty_like(x), has_offset=True)


@DTYPES
@pytest.mark.parametrize("size", [1, 96, pytest.param(2500, marks=pytest.mark.slow)])
def test_a_norm_with_an_offset_is_its_twin_and_a_row_has_the_same_bits_in_any_batch(device, dtype, size):
    x, weight = draw(device, dtype, 41, size) * 3, draw(device, dtype, size, seed=1)
    together = offset_norm(x, weight)
    assert_alike(together, offset_rms_norm(x, weight, 1e-6))
    for rows in (slice(0, 1), slice(40, 41), slice(3, 30)):
        assert torch.equal(offset_norm(x[rows], weight), together[rows])
    total, delta = x.clone(), draw(device, dtype, 41, size, seed=2)
    wanted = x + delta
    out = add_rms_norm(total, delta, weight, 1e-6, delta, has_offset=True)
    assert torch.equal(total, wanted) and torch.equal(out, offset_norm(wanted, weight))
