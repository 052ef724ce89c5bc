"""Swapping linears in a real module: names, sharing, gradients, and updates that must not be missed."""

import copy

import pytest
import torch

from rollout_engine.model.cpu.row_invariance import make_row_invariant
from rollout_engine.model.packing.linear_groups import fuse_projections, repack
from rollout_engine.testing import tiny_model

IDS = torch.arange(3, 43).view(2, 20)


@pytest.fixture
def pair():
    """(plain, row-invariant) copies of one model."""
    plain = tiny_model("qwen2")
    ours = copy.deepcopy(plain)
    make_row_invariant(ours)
    return plain, ours


def test_names_and_values_stay(pair):
    plain, ours = pair
    assert list(ours.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, plain(IDS).logits, atol=2e-5, rtol=1e-4)


def test_gradients_are_those_of_plain_linears(pair):
    for model in pair:
        model.requires_grad_(True)
        model(IDS).logits.square().mean().backward()
    for (name, p), (_, q) in zip(*(model.named_parameters() for model in pair), strict=True):
        torch.testing.assert_close(q.grad, p.grad, atol=2e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_an_optimizer_step_is_seen_at_once(pair):
    plain, ours = pair
    for model in pair:
        model.requires_grad_(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(IDS).logits.square().mean().backward()
        before = model(IDS).logits.detach()
        optimizer.step()
        assert not torch.equal(model(IDS).logits, before)
    torch.testing.assert_close(ours(IDS).logits, plain(IDS).logits, atol=1e-2, rtol=1e-2)


def test_a_deep_copy_is_independent(pair):
    _, ours = pair
    with torch.no_grad():
        before = ours(IDS).logits
        other = copy.deepcopy(ours)
        for parameter in other.parameters():
            parameter.mul_(0.5)
        assert not torch.equal(other(IDS).logits, before)
        assert torch.equal(ours(IDS).logits, before)


def test_fused_weights_are_slices_of_one_buffer():
    model = tiny_model("qwen2")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    fuse_projections(model)
    attention = model.model.layers[0].self_attn
    storages = {p.weight.untyped_storage().data_ptr() for p in (attention.q_proj, attention.k_proj, attention.v_proj)}
    assert len(storages) == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_repack_shows_writes_that_autograd_cannot_see():
    model = tiny_model("llama")
    fuse_projections(model)
    make_row_invariant(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        before = model(IDS).logits
        weight.data.zero_()
        repack(model)
        assert not torch.equal(model(IDS).logits, before)


def test_a_sibling_given_another_input_still_computes_its_own(pair):
    plain, ours = pair
    x, y = torch.randn(2, 5, 64)
    with torch.no_grad():
        q = ours.model.layers[0].self_attn.q_proj(x)
        k = ours.model.layers[0].self_attn.k_proj(y)
        torch.testing.assert_close(q, plain.model.layers[0].self_attn.q_proj(x), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(k, plain.model.layers[0].self_attn.k_proj(y), atol=1e-5, rtol=1e-4)
