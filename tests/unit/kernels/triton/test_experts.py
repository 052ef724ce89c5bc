"""Mixtures of experts: choices, groups, products and sums are right, and a row the same bits in any batch."""

import pytest
import torch

from rollout_engine.kernels.routing_rule import RoutingRule
from rollout_engine.kernels.triton.experts import Groups, add_weighted, multiply
from rollout_engine.kernels.triton.matmul import matmul
from rollout_engine.kernels.triton.routers import choose

DTYPES = [torch.float32, torch.bfloat16]


def _random(*shape, dtype=torch.float32, device="cpu", seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _chosen(logits, top_k, *, normalised, dtype=torch.float32):
    """(weights, experts, probabilities) by the kernel, in memory that holds anything."""
    weights = torch.full((len(logits), top_k), torch.nan, dtype=dtype, device=logits.device)
    experts = torch.full((len(logits), top_k), -7, dtype=torch.int32, device=logits.device)
    probabilities = torch.full(logits.shape, torch.nan, device=logits.device)
    choose(logits, weights, experts, RoutingRule(normalised, rounded=True), scores=probabilities)
    return weights, experts, probabilities


@pytest.mark.quick(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(5, 2), (8, 8), (60, 4), (1, 1), (300, 9)])
def test_the_most_probable_experts_are_chosen(device, dtype, normalised, num_experts, top_k):
    logits = _random(7, num_experts, dtype=dtype, device=device) * 3
    weights, experts, probabilities = _chosen(logits, top_k, normalised=normalised, dtype=dtype)
    exact = logits.double().softmax(-1)
    torch.testing.assert_close(probabilities.double(), exact, rtol=1e-5, atol=1e-9)
    order = torch.argsort(exact, dim=-1, descending=True, stable=True)[:, :top_k].sort(-1).values
    assert torch.equal(experts.long(), order)
    wanted = exact.gather(1, order)
    wanted = wanted / wanted.sum(-1, keepdim=True) if normalised else wanted
    torch.testing.assert_close(weights.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_of_equal_experts_the_first_are_chosen(device):
    logits = torch.tensor([[1.0, 2, 2, 2, 0], [0, 0, 0, 0, 0], [3, 1, 3, 1, 3]], device=device)
    _, experts, _ = _chosen(logits, 2, normalised=True)
    assert experts.tolist() == [[1, 2], [0, 1], [0, 2]]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_experts_that_exist_are_chosen_whatever_the_logits(device):
    rows = [[torch.nan] * 5, [-torch.inf] * 5, [torch.inf] * 5, [-torch.nan, 1, 2, torch.inf, 0]]
    _, experts, _ = _chosen(torch.tensor(rows, device=device), 3, normalised=True)
    assert all(sorted(set(row)) == row and 0 <= row[0] <= row[-1] < 5 for row in experts.tolist())


def test_a_choice_is_the_same_bits_in_any_batch(device):
    logits = _random(33, 60, dtype=torch.bfloat16, device=device)
    together = _chosen(logits, 4, normalised=True)
    for start, rows in ((0, 1), (5, 3), (16, 17)):
        alone = _chosen(logits[start : start + rows], 4, normalised=True)
        assert all(torch.equal(a, b[start : start + rows]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [(1, 2, 5), (300, 4, 7), (9, 1, 1), (6, 8, 40)])
def test_groups_are_the_entries_sorted_by_expert(device, num_tokens, top_k, num_experts):
    experts = torch.randint(num_experts, (num_tokens, top_k), generator=torch.Generator().manual_seed(0))
    order, starts = Groups.of(experts.int().to(device), num_experts)
    flat = experts.flatten()
    assert torch.equal(order.cpu().long(), flat.argsort(stable=True))
    counts = torch.bincount(flat, minlength=num_experts)
    assert starts.tolist() == [0, *counts.cumsum(0).tolist()]


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_is_the_product_with_its_expert(device, dtype):
    num_tokens, top_k, num_experts, size, out_features = 70, 2, 5, 40, 35
    x, weight = (
        _random(*s, dtype=dtype, device=device) for s in ((num_tokens, size), (num_experts, out_features, size))
    )
    experts = torch.randint(num_experts - 1, (num_tokens, top_k), generator=torch.Generator().manual_seed(0)).int()
    experts[experts == 2] = 4  # nothing goes to 2 and, but for these, to 4
    groups = Groups.of(experts.to(device), num_experts)
    flat = experts.flatten().tolist()

    def alone(row, expert):
        return matmul(row[None], weight[expert], None, row.new_empty(1, out_features))[0]

    by_entry = torch.stack([alone(x[i // top_k], e) for i, e in enumerate(flat)])
    by_place = by_entry[groups.order.long()]
    rows = x[groups.order.long() // top_k]
    for sent, k in ((x, top_k), (rows, 0)):
        for scatters, wanted in ((False, by_place), (True, by_entry)):
            out = torch.full((len(flat), out_features), torch.nan, dtype=dtype, device=device)
            assert torch.equal(multiply(sent, weight, groups, out, top_k=k, by_entry=scatters), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_in_another_layout_give_the_same_bits(device, dtype):
    x, weight = (_random(*shape, dtype=dtype, device=device) for shape in ((9, 40), (3, 35, 40)))
    groups = Groups.of((torch.arange(18, device=device).view(9, 2) % 3).int(), 3)
    wanted = multiply(x, weight, groups, x.new_empty(18, 35), top_k=2)
    by_columns = weight.mT.contiguous().mT
    assert not by_columns.is_contiguous()
    assert torch.equal(multiply(x, by_columns, groups, torch.full_like(wanted, torch.nan), top_k=2), wanted)
    with pytest.raises(ValueError, match="Rows should be contiguous"):
        multiply(x, weight[:, ::2], groups, x.new_empty(18, 18), top_k=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights_dtype", DTYPES)
def test_outputs_are_weighted_and_added_in_order(device, dtype, weights_dtype):
    outputs, weights = _random(5, 3, 70, dtype=dtype, device=device), _random(5, 3, device=device).to(weights_dtype)
    parts = (outputs * weights[..., None]).to(dtype)
    wanted = parts[:, 0] + parts[:, 1] + parts[:, 2]
    assert torch.equal(add_weighted(outputs, weights, torch.full_like(wanted, torch.nan)), wanted)


def test_nothing_is_computed_of_no_tokens(device):
    experts = torch.empty(0, 2, dtype=torch.int32, device=device)
    groups = Groups.of(experts, 3)
    assert groups.starts.tolist() == [0, 0, 0, 0]
    empty = torch.empty(0, 8, device=device)
    assert len(multiply(empty, torch.zeros(3, 8, 8, device=device), groups, empty, top_k=2)) == 0
    assert len(add_weighted(empty.view(0, 2, 8), empty[:, :2], empty)) == 0


def test_what_does_not_fit_is_refused(device):
    logits = torch.zeros(2, 4, device=device)
    with pytest.raises(ValueError, match="Expected 1 to 4 experts"):
        _chosen(logits, 5, normalised=True)
    groups = Groups.of(torch.zeros(2, 1, dtype=torch.int32, device=device), 4)
    with pytest.raises(ValueError, match="Dtypes should be equal"):
        multiply(logits, torch.zeros(4, 8, 4, device=device).bfloat16(), groups, torch.empty(2, 8, device=device))
