"""A float16 checkpoint is served in float32 on a CPU, says so, and is exact with a trainer that loads it likewise."""

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import ConfigError, RolloutPolicy, SamplingParams, exact


def test_a_float16_checkpoint_is_served_in_float32_and_says_so(checkpoint, caplog):
    directory = checkpoint("qwen3", torch.float16)
    with caplog.at_level(logging.INFO):
        policy = RolloutPolicy.from_pretrained(directory, num_kv_blocks=32, max_model_len=128)
    assert "dtype torch.float32 (stored as torch.float16)" in caplog.text
    assert "An exact trainer loads it with dtype=torch.float32" in caplog.text
    with policy:
        batch = policy.rollout(["a", "some words"], SamplingParams(max_tokens=8), use_tqdm=False)
        trainer = exact.enable(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
        logprobs = exact.token_logprobs(trainer, batch["tokens", "full"], batch["masks", "all_attention_mask"])
        assert exact.check(batch, logprobs).is_exact
        assert policy.update_weights(AutoModelForCausalLM.from_pretrained(directory)).version == 1  # float16 again


def test_float16_itself_is_refused_on_both_sides_with_what_to_use(checkpoint):
    directory = checkpoint("qwen3", torch.float16)
    with pytest.raises(ConfigError, match="dtype='float16' is not served on a CPU: use 'float32'.*on the trainer"):
        RolloutPolicy.from_pretrained(directory, dtype="float16")
    with pytest.raises(ConfigError, match="is torch.float16, in which no engine computes exactly.*torch.float32"):
        exact.enable(AutoModelForCausalLM.from_pretrained(directory))
