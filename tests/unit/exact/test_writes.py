"""Whatever writes a trainer's weights, its next forward computes with the new values."""

import copy

import pytest
import torch
from torch import nn

from rollout_engine import exact
from rollout_engine.testing import tiny_model

IDS = torch.randint(3, 259, (2, 24), generator=torch.Generator().manual_seed(0))
SMALL = dict(num_hidden_layers=1)
OPTIMIZERS = {
    name: optimizer
    for name, optimizer in vars(torch.optim).items()
    if isinstance(optimizer, type) and name not in ("Optimizer", "SparseAdam")  # which takes sparse gradients only
}
VARIANTS = [{}, {"foreach": True}, {"fused": True}, {"capturable": True}]


@pytest.fixture
def trainer():
    return exact.enable(tiny_model("qwen3", **SMALL)).requires_grad_(True)


def logprobs(model):
    with torch.no_grad():
        return exact.token_logprobs(model, IDS)


def of_the_same_values(model, architecture="qwen3"):
    """Log-probs of a model that has never been called, with the weights of `model` as they are now."""
    fresh = tiny_model(architecture, **SMALL)
    fresh.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return logprobs(exact.enable(fresh))


def step(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = -exact.token_logprobs(model, IDS).mean()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.quick(1)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: next(iter(variant), "default"))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_forward_after_a_step_has_the_stepped_weights(trainer, name, variant):
    parameters = [p for p in trainer.parameters() if p.dim() == 2] if name == "Muon" else trainer.parameters()
    before = logprobs(trainer)
    try:
        optimizer = OPTIMIZERS[name](parameters, lr=1e-2, **variant)
        step(trainer, optimizer)
    except (TypeError, RuntimeError, AssertionError, ValueError) as refused:  # by torch itself
        assert next(iter(variant), "") in str(refused)
        pytest.skip(f"{name} takes no {next(iter(variant))} here")
    step(trainer, optimizer)
    after = logprobs(trainer)
    assert not torch.equal(after, before)
    assert torch.equal(after, of_the_same_values(trainer))


def swap_with_an_average(model):
    """Swap storages, as trainers with an exponential moving average do."""
    average = copy.deepcopy(model)
    for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
        mean.data.mul_(0.7)
        mean.data, parameter.data = parameter.data, mean.data
    logprobs(model)
    for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
        mean.data.mul_(1.1)  # the storage that the model had before
        parameter.data.mul_(1.01)


def merge_an_adapter(model):
    """Merge an adapter as PEFT's `merge_adapter` does."""
    for child in model.modules():
        if isinstance(child, nn.Linear):
            child.weight.data += 0.05 * torch.randn(child.weight.shape[0], 2) @ torch.randn(2, child.weight.shape[1])


WRITES = {
    "data.copy_": lambda model: [p.data.copy_(torch.randn_like(p) * 0.1) for p in model.parameters()],
    "data assigned": lambda model: [setattr(p, "data", p.data * 1.5) for p in model.parameters()],
    "one element": lambda model: model.model.layers[0].mlp.down_proj.weight.data[3, 5:6].add_(0.5),
    "numpy": lambda model: [p.detach().numpy().__imul__(0.9) for p in model.parameters()],
    "load_state_dict": lambda model: model.load_state_dict({n: t * 0.8 for n, t in model.state_dict().items()}),
    "load_state_dict(assign=True)": lambda model: model.load_state_dict(
        {n: t * 0.8 for n, t in model.state_dict().items()}, assign=True
    ),
    "a new parameter": lambda model: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight * 2)),
    "average": swap_with_an_average,
    "merge": merge_an_adapter,
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("write", WRITES)
def test_writes_that_autograd_does_not_see_count(trainer, write):
    before = logprobs(trainer)
    WRITES[write](trainer)
    after = logprobs(trainer)
    assert not torch.equal(after, before)
    assert torch.equal(after, of_the_same_values(trainer))


def test_mixtures_of_experts_follow_fused_steps():
    experts = dict(SMALL, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24)
    trainer = exact.enable(tiny_model("qwen3_moe", **experts)).requires_grad_(True)
    step(trainer, torch.optim.AdamW(trainer.parameters(), lr=1e-2, fused=True))
    fresh = tiny_model("qwen3_moe", **experts)
    fresh.load_state_dict(trainer.state_dict())
    assert torch.equal(logprobs(trainer), logprobs(exact.enable(fresh)))


@pytest.mark.filterwarnings("ignore:.*activation_checkpointing_enable")  # its name from transformers 5.23 on
def test_accumulated_and_checkpointed_steps_are_those_of_one_batch():
    plain, checkpointed = (exact.enable(tiny_model("llama")).requires_grad_(True) for _ in range(2))
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed.train()
    for model in (plain, checkpointed):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for _ in range(2):
            optimizer.zero_grad()
            for half in IDS.split(1):
                (-exact.token_logprobs(model, half).mean() / 2).backward()
            optimizer.step()
    assert torch.equal(logprobs(plain), logprobs(checkpointed))
    assert torch.equal(logprobs(plain), logprobs(exact.enable(copy.deepcopy(plain))))


def test_two_trainers_that_share_parameters_both_follow():
    one, other = (exact.enable(tiny_model("qwen3", **SMALL)) for _ in range(2))
    for mine, theirs in zip(one.modules(), other.modules(), strict=True):
        for name in mine._parameters:
            theirs._parameters[name] = mine._parameters[name]
    one.requires_grad_(True)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        step(one, optimizer)
        assert torch.equal(logprobs(one), logprobs(other))
    assert torch.equal(logprobs(other), of_the_same_values(one))


def test_a_copy_starts_from_its_own_weights(trainer):
    step(trainer, torch.optim.Adam(trainer.parameters(), lr=1e-2, fused=True))
    twin = copy.deepcopy(trainer)
    for parameter in twin.parameters():
        parameter.data.mul_(0.9)
    assert not torch.equal(logprobs(twin), logprobs(trainer))
    assert torch.equal(logprobs(twin), of_the_same_values(twin))
