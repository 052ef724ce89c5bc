"""Routers by every part of their rule: the bits of the eager twin, of equal ones the first, and a row in any batch."""

import pytest
import torch

from rollout_engine.kernels.routing_rule import Groups
from rollout_engine.kernels.triton.routers import Routes, choose
from rollout_engine.model.modules.experts import Routing

# Of the interpreter: arithmetic on NaN and infinities, which the kernel means.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning"
)
TWO, ONE = Groups(4, 2, sums_two=True), Groups(4, 1, sums_two=False)
RULES = {
    "softmax": Routing(True, True),
    "softmax, float32": Routing(False, False, precise=True, scaling=1.5),
    "softmax, groups": Routing(False, False, groups=ONE, scaling=16.0),
    "sigmoid": Routing(True, True, sigmoid=True),
    "sigmoid, added": Routing(True, False, sigmoid=True, precise=True, scaling=2.5, added=1e-20),
    "sigmoid, least": Routing(True, True, sigmoid=True, least=1e-9),
    "sigmoid, groups": Routing(True, False, sigmoid=True, precise=True, groups=TWO, scaling=2.5, added=1e-20),
    "sigmoid, one of each group": Routing(True, True, sigmoid=True, groups=TWO._replace(sums_two=False)),
}
BY_RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def draw(*shape, dtype=torch.float32, device="cpu", seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def kernel_scores(logits, *, is_sigmoid):
    found = torch.full(logits.shape, torch.nan, device=logits.device)
    rule = Routing(normalised=False, rounded=False, sigmoid=is_sigmoid)
    weights, experts = logits.new_empty(len(logits), 1), logits.new_empty(len(logits), 1, dtype=torch.int32)
    choose(logits, weights, experts, rule, scores=found)
    return found


def chosen(logits, top_k, rule, dtype, bias=None, routes=None):
    """(weights, experts) by the kernel, in memory that holds anything."""
    shape, device = (len(logits), top_k), logits.device
    weights = torch.full(shape, torch.nan, dtype=dtype if rule.rounded else torch.float32, device=device)
    experts = torch.full(shape, -7, dtype=torch.int32, device=device)
    choose(logits, weights, experts, rule, bias=bias, routes=routes)
    return weights, experts.long()


def twin(logits, top_k, rule, dtype, bias=None):
    """(weights, experts, the experts as the router has them) by the eager twin, from the kernel's scores."""
    weights, experts = rule.select(logits, top_k, kernel_scores, bias=bias, dtype=dtype)
    order = experts.argsort(dim=-1)
    return weights.gather(-1, order), experts.gather(-1, order), experts


@pytest.mark.quick(1)
@DTYPES
@BY_RULE
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (60, 4), (256, 8)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_every_rule_gives_the_bits_of_its_twin(device, dtype, rule, num_experts, top_k, has_bias):
    logits = draw(9, num_experts, dtype=torch.float32 if rule.precise else dtype, device=device) * 3
    bias = draw(num_experts, dtype=dtype, device=device, seed=1) * 0.3 if has_bias else None
    weights, experts = chosen(logits, top_k, rule, dtype, bias)
    wanted, numbers, _ = twin(logits, top_k, rule, dtype, bias)
    assert torch.equal(experts, numbers) and torch.equal(weights, wanted)


@pytest.mark.parametrize("is_sigmoid", [True, False])
def test_scores_are_right(device, is_sigmoid):
    logits = draw(5, 60, device=device) * 8
    exact = logits.double().sigmoid() if is_sigmoid else logits.double().softmax(-1)
    torch.testing.assert_close(kernel_scores(logits, is_sigmoid=is_sigmoid).double(), exact, rtol=1e-5, atol=1e-12)


@BY_RULE
def test_of_equal_experts_and_groups_the_first_are_chosen(device, rule):
    logits = torch.zeros(2, 8, device=device)
    logits[1, 3::2] = 1.0  # of the groups of two, all but the first are alike
    _, experts = chosen(logits, 2, rule, torch.float32)
    few = rule.groups is not None and rule.groups.num_chosen == 1
    assert experts.tolist() == [[0, 1], [2, 3] if few else [3, 5]]
    assert torch.equal(experts, twin(logits, 2, rule, torch.float32)[1])


@pytest.mark.quick(5)
@BY_RULE
def test_negative_sums_of_score_and_bias_are_in_their_order(device, rule):
    logits, bias = draw(6, 8, device=device), draw(8, device=device, seed=1) - 3.0
    assert torch.equal(chosen(logits, 2, rule, torch.float32, bias)[1], twin(logits, 2, rule, torch.float32, bias)[1])


@pytest.mark.quick(5)
@BY_RULE
def test_experts_that_exist_are_chosen_whatever_the_logits(device, rule):
    rows = [[torch.nan] * 8, [-torch.inf] * 8, [torch.inf] * 8, [-torch.nan, 1, 2, torch.inf, 0, 0, 0, -1]]
    bias = torch.tensor([0.0, torch.nan, 0, -torch.inf, 0, 0, 0, 0], device=device)
    for given in (None, bias):
        _, experts = chosen(torch.tensor(rows, device=device), 2, rule, torch.float32, given)
        assert all(0 <= first < second < 8 for first, second in experts.tolist())


@pytest.mark.quick(1)
@BY_RULE
def test_a_choice_is_the_same_bits_in_any_batch(device, rule):
    logits, bias = draw(33, 64, device=device), draw(64, device=device, seed=1)
    together = chosen(logits, 6, rule, torch.bfloat16, bias)
    for start, rows in ((0, 1), (5, 3), (16, 17)):
        alone = chosen(logits[start : start + rows], 6, rule, torch.bfloat16, bias)
        assert all(torch.equal(a, b[start : start + rows]) for a, b in zip(alone, together, strict=True))


@pytest.mark.quick(2)
@BY_RULE
def test_given_experts_get_their_own_scores_and_choices_are_kept(device, rule):
    logits, bias = draw(4, 8, device=device), draw(8, device=device, seed=1)
    *_, own = twin(logits, 2, rule, torch.float32, bias)
    given = torch.tensor([[7, 0], [-1, -1], [2, 5], [-1, -1]], dtype=torch.int32, device=device)
    kept = torch.full((6, 2), 99, dtype=torch.uint8, device=device)
    slots = torch.tensor([5, 0, -1, 2], device=device)
    weights, experts = chosen(logits, 2, rule, torch.float32, bias, Routes(given, kept, slots))
    used = torch.where(given < 0, own, given.long())
    scores = kernel_scores(logits, is_sigmoid=rule.sigmoid).gather(1, used)
    if rule.normalised:
        total = scores[:, 0] + scores[:, 1] + rule.added
        scores = scores / total.clamp(min=rule.least)[:, None]
    scores = scores * rule.scaling
    order = used.argsort(-1)
    assert torch.equal(experts, used.gather(1, order)) and torch.equal(weights, scores.gather(1, order))
    assert kept.tolist() == [used[1].tolist(), [99, 99], used[3].tolist(), [99, 99], [99, 99], used[0].tolist()]


def test_rules_and_biases_that_do_not_fit_are_refused(device):
    logits = torch.zeros(2, 8, device=device)
    with pytest.raises(ValueError, match="Expected 1 to 2 experts"):
        chosen(logits, 3, RULES["softmax, groups"], torch.float32)
    with pytest.raises(ValueError, match="Expected 1 to 2 experts"):
        chosen(logits[:, :6].contiguous(), 1, RULES["sigmoid, groups"], torch.float32)
    with pytest.raises(ValueError, match="Expected a bias of 8 numbers"):
        chosen(logits, 2, RULES["sigmoid"], torch.float32, torch.zeros(7, device=device))
