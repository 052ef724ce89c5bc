"""Masters in float32: small steps add up, the trainer stays exact, and nothing else of an optimizer changes."""

import pytest
import torch
from torch import nn

from rollout_engine import ConfigError, RolloutPolicy, SamplingParams, exact, float32_masters
from rollout_engine.testing import tiny_checkpoint, tiny_model

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=0.0),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=0.0, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=0.0, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-5, momentum=0.9),
    "Adagrad, which has a state at once": lambda p: torch.optim.Adagrad(p, lr=1e-5, initial_accumulator_value=0.1),
}


def weights(dtype):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in ((40, 30), (30,))]


def train(parameters, optimizer, steps=50):
    for _ in range(steps):
        sum((p.float() * torch.arange(1, p.numel() + 1).view(p.shape)).sum() for p in parameters).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_weights_are_those_of_a_float32_training_rounded(name):
    parameters, wanted = weights(torch.bfloat16), [nn.Parameter(p.detach().float()) for p in weights(torch.bfloat16)]
    plain = weights(torch.bfloat16)
    train(parameters, float32_masters(OPTIMIZERS[name](parameters)))
    for step in range(50):  # gradients are rounded to bfloat16 on the way
        for p in wanted:
            p.grad = torch.arange(1, p.numel() + 1).view(p.shape).bfloat16().float()
        if not step:
            reference = OPTIMIZERS[name](wanted)
        reference.step()
    train(plain, OPTIMIZERS[name](plain))
    assert all(torch.equal(p, w.detach().bfloat16()) for p, w in zip(parameters, wanted, strict=True))
    assert any(not torch.equal(p, w) for p, w in zip(plain, parameters, strict=True)), "plain steps are lost"


def test_a_skipped_step_leaves_no_gradient_and_float32_weights_are_stepped_on_themselves():
    low, high = weights(torch.bfloat16)[0], weights(torch.float32)[0]
    optimizer = float32_masters(torch.optim.SGD([low, high], lr=1.0))
    assert optimizer.param_groups[0]["params"][1] is high
    (low.float().sum() + high.sum()).backward()
    optimizer.zero_grad()
    assert low.grad is None and high.grad is None
    before = low.detach().clone()
    optimizer.step()
    assert torch.equal(low, before)


def test_weights_that_are_added_later_have_masters_too():
    first, second = weights(torch.bfloat16)
    optimizer = float32_masters(torch.optim.SGD([first], lr=1e-5))
    optimizer.add_param_group({"params": [second]})
    assert [p.dtype for group in optimizer.param_groups for p in group["params"]] == [torch.float32] * 2
    before = second.detach().clone()
    train([first, second], optimizer, steps=200)
    assert not torch.equal(second, before)
    with pytest.raises(ConfigError, match="has some of these weights already"):
        optimizer.add_param_group({"params": [second]})
    assert len(optimizer.param_groups) == 2


def test_a_closure_that_is_none_is_no_closure():
    low = weights(torch.bfloat16)[0]
    optimizer = float32_masters(torch.optim.SGD([low], lr=1.0))
    for step in (lambda: optimizer.step(None), lambda: optimizer.step(closure=None)):
        before = low.detach().clone()
        low.float().sum().backward()
        step()
        assert not torch.equal(low, before)


def test_weights_that_something_else_has_changed_are_copied_anew():
    low = weights(torch.bfloat16)[0]
    optimizer = float32_masters(torch.optim.SGD([low], lr=0.5))
    with torch.no_grad():
        low.fill_(4.0)
    low.float().sum().backward()
    optimizer.step()
    assert (low == 3.5).all()


def test_what_it_cannot_do_is_refused():
    low = weights(torch.bfloat16)[0]
    optimizer = torch.optim.AdamW([low])
    low.grad = torch.ones_like(low)
    optimizer.step()
    with pytest.raises(ConfigError, match="has stepped already"):
        float32_masters(optimizer)
    wrapped = float32_masters(torch.optim.SGD([low], lr=1.0))
    for step in (lambda: wrapped.step(lambda: 0.0), lambda: wrapped.step(closure=lambda: 0.0)):
        with pytest.raises(ConfigError, match="takes no closure"):
            step()


def test_a_schedule_works_and_a_training_resumes_from_state_dict():
    low = weights(torch.bfloat16)[0]
    optimizer = float32_masters(torch.optim.AdamW([low], lr=1.0))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train([low], optimizer, 2)
    schedule.step()
    other = nn.Parameter(low.detach().clone())
    again = float32_masters(torch.optim.AdamW([other], lr=1.0))
    again.load_state_dict(optimizer.state_dict())
    for state in again.state.values():
        assert state["exp_avg"].dtype == torch.float32
    train([other], again, 1)
    train([low], optimizer, 1)
    assert torch.allclose(other, low, atol=4e-2), "but for what rounding the masters lost"


def test_a_bfloat16_trainer_stays_exact_and_its_small_steps_reach_the_engine(tmp_path):
    path = tiny_checkpoint(tmp_path, dtype=torch.bfloat16)
    shares = {}
    for name, wrap in (("plain", lambda optimizer: optimizer), ("masters", float32_masters)):
        trainer = exact.enable(tiny_model(dtype=torch.bfloat16)).requires_grad_(True)
        start = {n: p.detach().clone() for n, p in trainer.named_parameters()}
        optimizer = wrap(torch.optim.AdamW(trainer.parameters(), lr=1e-5, weight_decay=0.0))
        with RolloutPolicy.from_pretrained(path, dtype="bfloat16", num_kv_blocks=32, max_model_len=64) as policy:
            for step in range(12):
                batch = policy.rollout(["ab"], SamplingParams(max_tokens=6, seed=step), num_samples=2, use_tqdm=False)
                given = batch["tokens", "full"], batch["masks", "all_attention_mask"]
                logprobs = exact.token_logprobs(trainer, *given)
                assert exact.check(batch, logprobs).is_exact
                logprobs[batch["masks", "all_assistant_mask"][:, 1:]].mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                policy.update_weights(trainer)
        moved = sum(int((p != start[n]).sum()) for n, p in trainer.named_parameters())
        shares[name] = moved / sum(p.numel() for p in trainer.parameters())
    assert shares["masters"] > 1.5 * shares["plain"] > 0, shares


@pytest.mark.parametrize("model_first", [True, False])
def test_a_training_that_resumes_is_the_one_that_was_never_stopped(model_first, tmp_path):
    whole, parameters = weights(torch.bfloat16), weights(torch.bfloat16)
    train(whole, float32_masters(OPTIMIZERS["AdamW"](whole)), steps=40)
    optimizer = float32_masters(OPTIMIZERS["AdamW"](parameters))
    train(parameters, optimizer, steps=20)
    torch.save({"model": parameters, "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=False)

    resumed = weights(torch.bfloat16)
    optimizer = float32_masters(OPTIMIZERS["AdamW"](resumed))

    def load_weights():
        with torch.no_grad():
            for mine, theirs in zip(resumed, saved["model"], strict=True):
                mine.copy_(theirs)

    load_weights() if model_first else None
    optimizer.load_state_dict(saved["optimizer"])
    load_weights() if not model_first else None
    train(resumed, optimizer, steps=20)
    assert all(map(torch.equal, resumed, whole))


def test_a_state_without_masters_is_warned_of_and_one_of_other_weights_refused(caplog):
    parameters = weights(torch.bfloat16)
    optimizer = float32_masters(OPTIMIZERS["AdamW"](parameters))
    optimizer.load_state_dict(OPTIMIZERS["AdamW"](weights(torch.bfloat16)).state_dict())
    assert "the loaded state has no masters" in caplog.text
    state = optimizer.state_dict()
    state["float32_masters"] = state["float32_masters"][:1]
    with pytest.raises(ConfigError, match="expected masters of 2 weights, and 1 came"):
        optimizer.load_state_dict(state)
