"""Operations that could tie a row to its batch are found in a forward; those that cannot are let pass."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rollout_engine.kernels.activation import silu
from rollout_engine.model.modules.row_trial import unproven_operations


class Net(nn.Module):
    """A causal LM as far as the trial can tell: embeds, then applies `function`."""

    def __init__(self, function, size=40, dtype=torch.float32):
        super().__init__()
        self.function = function
        self.embed = nn.Embedding(4, size, dtype=dtype)
        self.weight = nn.Parameter(torch.randn(size, size, dtype=dtype))

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.function(self, self.embed(input_ids)))


def found(function, **kwargs):
    return unproven_operations(Net(function, **kwargs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_found(dtype):
    assert found(lambda net, x: F.linear(x, net.weight), dtype=dtype) == ["mm"]


def test_a_rotarys_outer_product_is_not():
    assert found(lambda net, x: x[..., None] @ torch.ones(1, 2, 1, 7)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 3, 40])
def test_an_activation_with_a_seam_is_found_whatever_hides_it(size, dtype):
    assert found(lambda net, x: torch.sigmoid(x), size=size, dtype=dtype) == ["sigmoid"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_of_rows_alone_pass(dtype):
    def function(net, x):
        y = (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * silu(x).tanh()
        y = F.layer_norm(y, (40,)).softmax(-1) + x.cos() * x.sin()
        return F.relu(torch.cat([y, -y], -1))

    assert found(function, dtype=dtype) == []


def test_an_addition_with_a_factor_is_found():
    assert found(lambda net, x: torch.add(x, x, alpha=0.3)) == ["add"]


def test_a_function_of_one_weight_is_no_part_of_a_row():
    def function(net, x):
        net.slope = net.slope if hasattr(net, "slope") else nn.Parameter(torch.ones(1))
        return F.softplus(net.slope) * x

    assert found(function) == []
    assert found(lambda net, x: F.softplus(x)) == ["softplus"]


def test_a_sum_over_the_tokens_is_found():
    assert found(lambda net, x: x - x.sum(1, keepdim=True)) == ["sum"]


def test_what_is_not_known_is_found():
    assert found(lambda net, x: x.cumsum(1)) == ["cumsum"]


def test_threads_and_torchs_generator_are_left_as_they_were():
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    net = Net(lambda net, x: x.cos())
    state = torch.get_rng_state()
    unproven_operations(net)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_what_a_first_forward_computes_and_keeps_is_no_part_of_a_row():
    def function(net, x):
        if not hasattr(net, "kept"):
            net.kept = 10_000.0 ** torch.arange(0, 1, 1 / 40)
        return x * net.kept

    assert found(function) == []


@pytest.mark.parametrize("first", [lambda x: torch.pow(10_000.0, x), lambda x: torch.pow(10_000.0, x[:, :0])])
def test_what_cannot_be_tried_is_found(first):
    assert found(lambda net, x: first(x)) == ["pow"]


def test_a_forward_that_fails_is_found_with_its_reason():
    def function(net, x):
        raise IndexError("no third token")

    assert found(function) == ["its forward, which fails on two tokens (IndexError: no third token)"]
