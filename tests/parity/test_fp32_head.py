"""A bfloat16 model with a float32 output head: engine and exact trainer agree bit for bit, also after updates."""

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import ConfigError, EngineConfig, RolloutPolicy, SamplingParams, exact
from rollout_engine.testing.architectures import SIZES

DTYPE = torch.bfloat16
PROMPTS = ["a", "some words", "a prompt of more than sixty-four tokens, so that it spans more than one tile of KV"]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def policy_for(directory, **options):
    return RolloutPolicy.from_pretrained(
        directory, dtype="bfloat16", num_kv_blocks=128, max_model_len=256, log_stats=False, **options
    )


def trainer_for(directory, **options):
    return exact.enable(AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPE), **options)


def rollout(policy):
    return policy.rollout(PROMPTS, PARAMS, num_samples=2, seed=1, use_tqdm=False)


def trained_logprobs(trainer, batch):
    return exact.token_logprobs(trainer, batch["tokens", "full"], batch["masks", "all_attention_mask"])


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("qwen3", dict(tie_word_embeddings=False)),
        ("qwen3", dict(tie_word_embeddings=True)),
        ("gemma2", dict(tie_word_embeddings=True, final_logit_softcapping=30.0)),  # modules, and logits edited after
    ],
)
def test_no_bit_differs_from_the_trainer_before_and_after_updates(checkpoint, architecture, overrides):
    directory = checkpoint(architecture, DTYPE, **SIZES[architecture] | overrides)
    trainer = trainer_for(directory, fp32_head=True)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
    with policy_for(directory, fp32_head=True) as policy:
        for step in range(3):
            batch = rollout(policy)
            logprobs = trained_logprobs(trainer, batch)
            assert str(exact.check(batch, logprobs)).startswith("exact: 72 tokens")
            assert torch.equal(policy.score(batch), batch["log_probs", "full"])
            logprobs.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                policy.sleep(level=2)
                policy.wake_up()
            policy.update_weights(trainer)


def test_logits_are_not_rounded_and_gradients_are_the_plain_ones(checkpoint):
    directory = checkpoint("llama", DTYPE)
    plain, wide = trainer_for(directory), trainer_for(directory, fp32_head=True)
    exact.enable(wide)  # once more: the head stays as it is
    ids = torch.randint(3, 259, (2, 20), generator=torch.Generator().manual_seed(0))
    assert wide(ids).logits.dtype == torch.float32 and plain(ids).logits.dtype == DTYPE
    assert torch.equal(wide(ids).logits.to(DTYPE), plain(ids).logits)
    hidden = wide.model(ids).last_hidden_state
    expected = hidden.float() @ wide.lm_head.weight.float().T
    torch.testing.assert_close(wide(ids).logits, expected, atol=1e-5, rtol=1e-5)
    for model in (plain, wide):
        exact.token_logprobs(model, ids).mean().backward()
    for (name, p), q in zip(plain.named_parameters(), wide.parameters(), strict=True):
        assert q.grad.dtype == DTYPE
        assert (p.grad.float() - q.grad.float()).norm() / p.grad.float().norm() < 0.1, name
    assert exact.enable(wide, fp32_head=False)(ids).logits.dtype == DTYPE


def test_a_head_of_one_side_alone_is_named(checkpoint, caplog):
    directory = checkpoint("qwen3", DTYPE, **SIZES["qwen3"])
    with policy_for(directory, fp32_head=True) as policy:
        batch = rollout(policy)
    trainer = trainer_for(directory)
    with caplog.at_level(logging.WARNING), torch.no_grad():
        logprobs = trained_logprobs(trainer, batch)
    assert "call exact.enable(model, fp32_head=True). Until then" in caplog.text
    report = exact.check(batch, logprobs)
    assert not report.is_exact and "call exact.enable(model, fp32_head=True)" in report.cause


def test_a_float32_model_has_such_a_head_anyway(checkpoint):
    directory = checkpoint("qwen3", **SIZES["qwen3"])
    trainer = exact.enable(AutoModelForCausalLM.from_pretrained(directory))
    with RolloutPolicy.from_pretrained(directory, num_kv_blocks=64, max_model_len=256, fp32_head=True) as policy:
        batch = rollout(policy)
    with torch.no_grad():
        assert exact.check(batch, trained_logprobs(trainer, batch)).is_exact


@pytest.mark.parametrize("other", [dict(device="cuda"), dict(deterministic=False)])
def test_where_it_cannot_be_it_is_refused(other):
    with pytest.raises(ConfigError, match="fp32_head=True and .* are both set"):
        EngineConfig(model="some", fp32_head=True, **other)
