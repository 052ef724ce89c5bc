"""Rotary embeddings with two sets of frequencies (Phi-3 128k): exact up to the original length, refused beyond."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, ConfigError, RequestError, SamplingParams, exact
from rollout_engine.testing.architectures import SIZES

ORIGINAL_LENGTH = 64
FACTORS = {"short_factor": [1.0, 1.0, 1.1, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
PROMPTS = [[5, 6, 7], list(range(10, 50))]


@pytest.fixture(scope="module", params=["config", "rope_scaling"])
def directory(request, checkpoint):
    """A tiny Phi-3, its configuration as transformers writes it now, and as Microsoft's checkpoints have it."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL_LENGTH}
    sizes = SIZES["phi3"] | dict(head_dim=8, hidden_size=24, num_attention_heads=3)
    lengths = dict(max_position_embeddings=256, original_max_position_embeddings=ORIGINAL_LENGTH)
    path = checkpoint("phi3", rope_parameters=rope | FACTORS, name=request.param, **lengths, **sizes)
    if request.param == "rope_scaling":
        config = json.loads((path / "config.json").read_text())
        del config["rope_parameters"]
        config |= {"rope_theta": 10000.0, "rope_scaling": {"type": "longrope"} | FACTORS}
        (path / "config.json").write_text(json.dumps(config))
    return path


def generate(directory, **options):
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=0, ignore_eos=True)
    with LLM(str(directory), log_stats=False, num_kv_blocks=16, deterministic=True, **options) as llm:
        return [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.quick(1)
def test_every_load_serves_the_tokens_of_transformers_and_the_log_probs_of_an_exact_trainer(directory):
    first, second = generate(directory), generate(directory, max_num_batched_tokens=16)
    reference = AutoModelForCausalLM.from_pretrained(directory)
    trainer = exact.enable(exact.enable(AutoModelForCausalLM.from_pretrained(directory)))
    for prompt, sample, again in zip(PROMPTS, first, second, strict=True):
        assert sample.token_ids == again.token_ids
        whole = torch.tensor([prompt + sample.token_ids])
        with torch.no_grad():
            logits = reference(whole).logits[0, len(prompt) - 1 : -1]
            logprobs = exact.token_logprobs(trainer, whole)[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == sample.token_ids
        assert torch.equal(torch.from_numpy(sample.logprobs), logprobs)
        assert torch.equal(torch.from_numpy(again.logprobs), logprobs)


def test_lengths_of_the_other_frequencies_are_refused(directory):
    with pytest.raises(ConfigError, match=f"max_model_len=65 is not allowed.*up to {ORIGINAL_LENGTH} positions"):
        LLM(str(directory), max_model_len=ORIGINAL_LENGTH + 1)
    with LLM(str(directory), log_stats=False, num_kv_blocks=16) as llm:
        with pytest.raises(RequestError, match=f"max_model_len={ORIGINAL_LENGTH}"):
            llm.generate([[5] * 60], SamplingParams(max_tokens=5), use_tqdm=False)
    trainer = exact.enable(AutoModelForCausalLM.from_pretrained(directory))
    with pytest.raises(ValueError, match=f"has 65 positions.*at most {ORIGINAL_LENGTH}"):
        exact.token_logprobs(trainer, torch.ones(1, ORIGINAL_LENGTH + 1, dtype=torch.int64))
