"""The trainer's side of LoRA adapters: the engine's bits, gradients, and what is said where there are none."""

import copy
import logging

import pytest
import torch

from rollout_engine import RolloutPolicy, SamplingParams, concat, exact
from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.testing import tiny_checkpoint, tiny_model
from tests.unit.peft_layers import PeftModel, dense

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
IDS = torch.arange(3, 40)[None]


def _rollout(policy, lora):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    return policy.rollout(["abc", "x" * 70], params, num_samples=3, seed=1, lora_request=lora, use_tqdm=False)


def _logprobs(model, batch):
    values = exact.token_logprobs(model, batch["tokens", "full"], batch["masks", "all_attention_mask"])
    return values[batch["masks", "all_assistant_mask"][:, 1:]]


def _sampled(values, batch):
    return values[:, 1:][batch["masks", "all_assistant_mask"][:, 1:]]


@pytest.mark.quick(1)
@DTYPES
@pytest.mark.parametrize("is_enabled_first", [True, False], ids=["enabled, then wrapped", "wrapped, then enabled"])
def test_the_trainer_has_the_engines_bits_and_gradients(tmp_path, dtype, is_enabled_first):
    path = tiny_checkpoint(tmp_path, dtype=dtype)
    base = tiny_model(dtype=dtype)
    trainer = PeftModel(exact.enable(base) if is_enabled_first else base)
    assert exact.enable(trainer) is trainer and exact.enable(trainer) is trainer
    name = str(dtype).removeprefix("torch.")
    with RolloutPolicy.from_pretrained(path, dtype=name, num_kv_blocks=256, max_model_len=256) as policy:
        policy.add_lora(trainer.request())
        batch = _rollout(policy, "x")
        ours = _logprobs(trainer, batch)
        assert torch.equal(ours.detach(), _sampled(batch["log_probs", "full"], batch))
        for layer in trainer.adapters():
            layer.disable_adapters = True
        reference = _logprobs(trainer, batch).detach()
        assert torch.equal(reference, _sampled(policy.score(batch), batch))
        assert not torch.equal(reference, ours.detach())
    ours.sum().backward()
    for parameter_name, parameter in trainer.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) == ("lora_" in parameter_name)


def test_a_batch_is_computed_under_the_adapter_that_sampled_it_or_refused(tmp_path):
    path, trainer = tiny_checkpoint(tmp_path), exact.enable(PeftModel(tiny_model(), name="red"))
    with RolloutPolicy.from_pretrained(path, num_kv_blocks=256, max_model_len=256) as policy:
        policy.add_lora(trainer.request("red"))
        policy.add_lora(trainer.request("blue"))
        red, blue, base = (_rollout(policy, name) for name in ("red", "blue", None))
        with torch.no_grad():
            assert exact.check(red, exact.token_logprobs(trainer, red)).is_exact
            assert exact.check(blue, exact.token_logprobs(trainer, blue)).is_exact  # the trainer's name is another
            for layer in trainer.adapters():
                layer.disable_adapters = True
            reference = exact.token_logprobs(trainer, red)
            assert torch.equal(_sampled(policy.score(red), red), reference[red["masks", "all_assistant_mask"][:, 1:]])
            assert exact.check(base, exact.token_logprobs(trainer, base)).is_exact
    for layer in trainer.adapters():
        layer.disable_adapters = False
        for parts in (layer.lora_A, layer.lora_B, layer.lora_dropout):
            parts["blue"] = copy.deepcopy(parts["red"])
        layer.scaling["blue"], layer.active_adapters = layer.scaling["red"], ["blue"]
    with pytest.raises(
        RequestError, match=r"active adapter='blue' is not allowed: must be 'red', .*set_adapter\('red'\)"
    ):
        exact.token_logprobs(trainer, red)
    with pytest.raises(RequestError, match="adapters that sampled the batch='blue, red' is not allowed: must be one"):
        exact.token_logprobs(trainer, concat([red, blue]))
    exact.token_logprobs(trainer, red["tokens", "full"], red["masks", "all_attention_mask"])


def test_gradients_are_those_of_the_layers_before():
    plain, trainer = PeftModel(tiny_model()), PeftModel(tiny_model())
    trainer.load_state_dict(plain.state_dict())
    exact.enable(trainer)
    for model in (plain, trainer):
        model(input_ids=IDS).logits.log_softmax(-1)[..., 7].sum().backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in trainer.named_parameters():
        if "lora_" in name:
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-3)


def test_steps_of_an_optimizer_are_seen_at_the_next_forward(tmp_path):
    trainer = exact.enable(PeftModel(tiny_model()))
    optimizer = torch.optim.SGD([p for p in trainer.parameters() if p.requires_grad], lr=0.1)
    with RolloutPolicy.from_pretrained(tiny_checkpoint(tmp_path), num_kv_blocks=256, max_model_len=256) as policy:
        for revision in range(2):
            policy.add_lora(trainer.request(revision=revision))
            batch = _rollout(policy, "x")
            logprobs = _logprobs(trainer, batch)
            assert torch.equal(logprobs.detach(), _sampled(batch["log_probs", "full"], batch))
            logprobs.mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_one_plain_adapter_is_said_to_be_exact(caplog):
    with caplog.at_level(logging.WARNING, "rollout_engine"):
        exact.token_logprobs(exact.enable(PeftModel(tiny_model())), IDS)
    assert not caplog.records


@pytest.mark.parametrize("kind", ["variant", "bias", "two"])
def test_adapters_that_no_engine_computes_run_as_before_and_are_said(caplog, kind):
    trainer = PeftModel(tiny_model())
    for layer in trainer.adapters():
        if kind == "variant":
            layer.lora_variant["default"] = object()
        elif kind == "bias":
            layer.lora_B["default"].bias = torch.nn.Parameter(torch.ones(layer.base_layer.out_features))
        else:
            layer.active_adapters = ["default", "default"]
    expected = dense(copy.deepcopy(trainer), IDS)
    exact.enable(trainer)
    with caplog.at_level(logging.WARNING, "rollout_engine"):
        exact.token_logprobs(trainer, IDS)
    assert "has an adapter that is not merged, and that no engine computes" in caplog.text
    torch.testing.assert_close(dense(trainer, IDS), expected, rtol=1e-3, atol=1e-2)


def test_an_adapter_of_the_head_is_said_once_while_it_computes(caplog):
    trainer = PeftModel(tiny_model(), targets=("q_proj", "lm_head"))
    expected = dense(copy.deepcopy(trainer), IDS)
    exact.enable(exact.enable(trainer))
    head = trainer.get_base_model().lm_head
    assert len(head._forward_pre_hooks) == 1
    with caplog.at_level(logging.WARNING, "rollout_engine"):
        head.merged = True
        exact.token_logprobs(trainer, IDS)
        assert not caplog.records
        head.merged = False
        exact.token_logprobs(trainer, IDS)
        exact.token_logprobs(trainer, IDS)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "The head has an adapter that is not merged"
    ]
    torch.testing.assert_close(dense(trainer, IDS), expected, rtol=1e-3, atol=1e-2)


def test_dropout_of_an_adapter_is_refused():
    trainer = exact.enable(PeftModel(tiny_model(), dropout=0.1).train())
    with pytest.raises(ConfigError, match="dropped activations at random .*lora_dropout"):
        exact.token_logprobs(trainer, IDS)
    exact.token_logprobs(trainer.eval(), IDS)


def test_a_copy_computes_the_same():
    trainer = exact.enable(PeftModel(tiny_model()))
    assert torch.equal(exact.token_logprobs(copy.deepcopy(trainer), IDS), exact.token_logprobs(trainer, IDS))


def test_another_adapter_is_named_as_the_cause(tmp_path):
    trainer = exact.enable(PeftModel(tiny_model()))
    with RolloutPolicy.from_pretrained(tiny_checkpoint(tmp_path), num_kv_blocks=256, max_model_len=256) as policy:
        policy.add_lora(trainer.request())
        forgotten, adapted = _rollout(policy, None), _rollout(policy, "x")
        scored = policy.score(adapted)[:, 1:]
        same = policy.score(adapted, lora="x")

    def cause(batch, logprobs):
        return exact.check(batch, logprobs).cause

    def computed(batch):
        return exact.token_logprobs(trainer, batch["tokens", "full"], batch["masks", "all_attention_mask"])

    told = cause(forgotten, computed(forgotten))
    assert "was sampled without an adapter, the log-probs are under the adapter 'default'" in told
    assert "lora_request=NAME" in told
    assert exact.check(adapted, computed(adapted)).is_exact and torch.equal(same, adapted["log_probs", "full"])
    for layer in trainer.adapters():
        layer.disable_adapters = True
    assert "under the adapter 'x', the log-probs are without an adapter" in cause(adapted, computed(adapted))
    assert exact.check(forgotten, computed(forgotten)).is_exact
    assert "adapter" not in cause(adapted, scored)  # a slice: nothing is known of it
