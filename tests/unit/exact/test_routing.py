"""Routing replay on the trainer's side: choices recorded, replayed, refused, and their gradients."""

import copy

import numpy as np
import pytest
import torch

from rollout_engine import ConfigError, RequestError, exact, routing
from rollout_engine.model.modules.routers import routers_of
from rollout_engine.testing.architectures import sizes_of
from rollout_engine.testing.models import tiny_model

MIXTURES = (
    "qwen3_moe mixtral olmoe qwen2_moe granitemoe gpt_oss deepseek_v3 gemma4_text_experts longcat_flash"
).split()
IDS = torch.arange(3, 27).view(2, 12)


def make(name="qwen3_moe"):
    architecture, sizes = sizes_of(name)
    return tiny_model(architecture, **sizes)


def recorded(model, ids=IDS):
    with routing.record(model) as found, torch.no_grad():
        model(input_ids=ids)
    return found.routed_experts


def perturbed(model, seed=1):
    """The same model with routers that choose otherwise."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for index, router in enumerate(routers_of(other)):
            matrix = next(parameter for parameter in router.parameters() if parameter.dim() == 2)
            noise = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(seed + index))
            matrix.copy_(noise * matrix.std())
    return other


def gradients(model, ids=IDS):
    logits = model(input_ids=ids).logits
    return torch.autograd.grad(logits.log_softmax(-1)[..., 5].sum(), list(model.parameters()), allow_unused=True)


def same(one, two):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.quick(5)
@pytest.mark.parametrize("architecture", MIXTURES)
def test_with_the_same_weights_a_replay_changes_no_bit_of_logits_and_gradients(architecture):
    model = make(architecture)
    chosen = recorded(model)
    with torch.no_grad():
        plain = model(input_ids=IDS).logits
        with routing.replay(model, chosen):
            assert torch.equal(model(input_ids=IDS).logits, plain)
    before = gradients(model)
    with routing.replay(model, chosen):
        assert same(gradients(model), before)


@pytest.mark.quick(3)
@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize(
    "architecture", ["qwen3_moe", "mixtral", "gpt_oss", "gemma4_text_experts", "deepseek_v3", "longcat_flash"]
)
def test_with_moved_routers_a_replay_brings_the_rollouts_experts_back(architecture, is_exact):
    model = make(architecture)
    chosen = recorded(model)
    moved = perturbed(model)
    if is_exact:
        exact.enable(moved)
    assert routing.flipped(recorded(moved), chosen).float().mean() > 0.3
    with routing.replay(moved, chosen):
        assert torch.equal(recorded(moved), chosen)
        found = gradients(moved)
    matrices = {id(p) for router in routers_of(moved) for p in router.parameters() if p.dim() == 2}
    of_routers = [g for p, g in zip(moved.parameters(), found, strict=True) if id(p) in matrices]
    assert of_routers and all(gradient.abs().sum() > 0 for gradient in of_routers)
    assert not torch.equal(recorded(moved), chosen)  # nothing stays behind


def test_the_weights_of_replayed_experts_are_the_routers_own_probabilities_normalised():
    model = make("qwen3_moe")
    (router, *_) = routers_of(model)
    x = torch.randn(7, router.weight.shape[1])
    experts = torch.tensor([[1, 4]] * 7)
    with routing.replay(model, experts[:, None].expand(7, 2, 2)):
        logits, weights, chosen = router(x)
    probabilities = logits.float().softmax(-1)[:, [1, 4]]
    expected = probabilities / probabilities.sum(-1, keepdim=True) if router.norm_topk_prob else probabilities
    assert torch.equal(chosen, experts) and torch.allclose(weights, expected.to(weights.dtype))


def test_rows_of_minus_one_are_routed_by_the_model_itself():
    model = make()
    chosen, moved = recorded(model), perturbed(model)
    partly = chosen.clone().view(2, 12, 2, 2)
    partly[:, 6:] = -1
    with routing.replay(moved, partly):
        found = recorded(moved).view(2, 12, 2, 2)
    assert torch.equal(found[:, :6], chosen.view(2, 12, 2, 2)[:, :6])
    assert routing.flipped(found[:, 6:], chosen.view(2, 12, 2, 2)[:, 6:]).any()


@pytest.mark.parametrize(
    "given, message",
    [
        (torch.zeros(24, 2, 3, dtype=torch.int64), r"torch.int64 \[24, 2, 3\].*integers \[B, T, 2, 2\] or \[N, 2, 2\]"),
        (torch.zeros(24, 3, 2, dtype=torch.int64), r"\[24, 3, 2\].*must be integers \[B, T, 2, 2\]"),
        (torch.zeros(24, 2, 2), r"torch.float32 \[24, 2, 2\]"),
        (torch.tensor([[[0, 1], [0, 5]]]), r"routed_experts\[0, 1\]=\[0, 5\].*2 experts in \[0, 5\), or -1"),
        (torch.tensor([[[0, 1], [-1, 2]]]), r"routed_experts\[0, 1\]=\[-1, 2\]"),
        (np.array([[[3, 3], [0, 1]]], np.uint8), r"routed_experts\[0, 0\]=\[3, 3\].*2 different experts in \[0, 5\)"),
    ],
)
def test_experts_that_do_not_fit_the_model_are_refused(given, message):
    with pytest.raises(RequestError, match=message), routing.replay(make(), given):
        pass


def test_a_forward_of_another_number_of_tokens_is_refused_and_leaves_nothing_behind():
    model = make()
    chosen = recorded(model)
    with pytest.raises(RequestError, match="'23 tokens' is not allowed: must be one entry for each of the 24 tokens"):
        with routing.replay(model, chosen[:23]):
            model(input_ids=IDS)
    assert torch.equal(recorded(model), chosen)
    assert not any(router._forward_hooks or router._forward_pre_hooks for router in routers_of(model))


def test_a_model_without_routers_is_refused():
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no routers"), routing.replay(make("qwen3"), IDS):
        pass
    with pytest.raises(ConfigError, match="not every router has computed"), routing.record(make()) as found:
        assert found.routed_experts is None


def test_under_gradient_checkpointing_the_backward_belongs_inside():
    model = make()
    chosen = recorded(model)
    moved = perturbed(model).train()
    with routing.replay(moved, chosen):
        expected = gradients(moved)
    moved.activation_checkpointing_enable({"use_reentrant": False})
    with routing.replay(moved, chosen):
        assert same(gradients(moved), expected)
    with pytest.raises(ConfigError, match="Gradient checkpointing computes the layers again"):
        with routing.replay(moved, chosen):
            moved(input_ids=IDS)
    with torch.no_grad(), routing.replay(moved, chosen):
        moved(input_ids=IDS)


def test_padding_is_on_the_right():
    found = routing.padded([np.ones((2, 1, 3), np.uint8), np.zeros((0, 1, 3), np.uint8)], 3)
    assert found.dtype == torch.int16 and found[:, :, 0, 0].tolist() == [[1, 1, -1], [-1, -1, -1]]
    with pytest.raises(RequestError, match=r"must be one or more \[n up to 1, L, k\]"):
        routing.padded([np.ones((2, 1, 3), np.uint8)], 1)


def test_a_flip_is_another_set_of_experts():
    first = torch.tensor([[[0, 1]], [[2, 3]], [[4, 5]], [[-1, -1]]])
    second = torch.tensor([[[1, 0]], [[2, 4]], [[4, 5]], [[0, 1]]], dtype=torch.int16)
    assert routing.flipped(first, second).tolist() == [[False], [True], [False], [False]]


# exact.token_logprobs


def left_padded(ids, experts, num):
    """A batch with `num` columns of padding, the second row's on the left and the first row's on the right."""
    pad = [(0, num), (num, 0)]
    rows = [torch.nn.functional.pad(row, side) for row, side in zip(ids, pad, strict=True)]
    masks = [torch.nn.functional.pad(torch.ones_like(row), side) for row, side in zip(ids, pad, strict=True)]
    given = [torch.nn.functional.pad(e, (0, 0, 0, 0, *side)) for e, side in zip(experts, pad, strict=True)]
    return torch.stack(rows), torch.stack(masks), torch.stack(given)  # padded with 0: not looked at


@pytest.mark.quick(1)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_log_probs_with_a_replay_are_those_of_the_same_routing_in_every_layout(architecture):
    model = exact.enable(make(architecture))
    chosen = recorded(model).view(2, 12, 2, 2)
    assert torch.equal(exact.token_logprobs(model, IDS, routed_experts=chosen), exact.token_logprobs(model, IDS))
    moved = exact.enable(perturbed(make(architecture)))
    found = exact.token_logprobs(moved, IDS, routed_experts=chosen)
    assert not torch.equal(found, exact.token_logprobs(moved, IDS))
    with routing.replay(moved, chosen):
        expected = exact.logprobs_of(moved(input_ids=IDS).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert torch.equal(found.flatten(), expected)
    assert torch.equal(exact.token_logprobs(moved, IDS, routed_experts=chosen[:, :-1]), found)
    both, _ = exact.token_logprobs_and_entropies(moved, IDS, routed_experts=chosen)
    assert torch.equal(both, found)
    ids, mask, experts = left_padded(IDS, chosen, 3)
    padded = exact.token_logprobs(moved, ids, mask, routed_experts=experts)
    assert torch.equal(padded[0, :11], found[0]) and torch.equal(padded[1, 3:], found[1])
    packed = exact.token_logprobs(
        moved, IDS.view(1, 24), cu_seqlens=torch.tensor([0, 12, 24]), routed_experts=chosen.view(1, 24, 2, 2)
    )
    assert torch.equal(packed[0, :11], found[0]) and torch.equal(packed[0, 12:], found[1])


def test_log_probs_with_a_replay_are_refused_under_gradient_checkpointing():
    model = exact.enable(make()).train()
    chosen = recorded(model).view(2, 12, 2, 2)
    model.activation_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ConfigError, match="Gradient checkpointing computes the layers again"):
        exact.token_logprobs(model, IDS, routed_experts=chosen)
    with torch.no_grad():
        assert torch.equal(exact.token_logprobs(model, IDS, routed_experts=chosen), exact.token_logprobs(model, IDS))


def test_routed_experts_that_do_not_fit_the_batch_are_refused():
    model = exact.enable(make())
    with pytest.raises(RequestError, match=r"\[2, 9, 2, 2\].*must be integers \[2, 12 or 11, 2, 2\]"):
        exact.token_logprobs(model, IDS, routed_experts=torch.zeros(2, 9, 2, 2, dtype=torch.int16))
