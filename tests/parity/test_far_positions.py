"""Positions beyond what a configuration names: original lengths, windows, layers that do not rotate, scales of queries.

Prompts are longer than all of these. Log-probs of prompts and samples are transformers', and those of samples have the
bits of an exact trainer.
"""

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, SamplingParams, exact
from rollout_engine.testing.architectures import SIZES

ORIGINAL = 40
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=ORIGINAL)
LLAMA3 = YARN | dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)
QUERIES = YARN | dict(beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3)
HEADS = SIZES["llama"]
MODELS = {
    "ministral3": HEADS | dict(rope_parameters=QUERIES),
    "ministral3 with a window": HEADS | dict(rope_parameters=QUERIES, sliding_window=19),
    "llama with yarn": HEADS | dict(rope_parameters=YARN),
    "llama with llama3's rope": HEADS | dict(rope_parameters=LLAMA3),
    "mistral with yarn": SIZES["mistral"] | dict(rope_parameters=YARN),
    "smollm3": HEADS | dict(num_hidden_layers=4, rope_parameters=YARN),
    "cwm": HEADS | dict(sliding_window=19, layer_types=["sliding_attention", "full_attention"], rope_parameters=LLAMA3),
    "qwen3_moe": SIZES["qwen3_moe"] | dict(rope_parameters=YARN),
}
SLOW = {"mistral with yarn", "cwm", "qwen3_moe", "ministral3 with a window"}
LENGTHS = (3, ORIGINAL - 5, 2 * ORIGINAL - 3, 3 * ORIGINAL + 7)


def run(directory, dtype):
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 259) for _ in range(length)] for length in LENGTHS]
    params = SamplingParams(seed=1, max_tokens=12, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    with LLM(str(directory), dtype=dtype, log_stats=False, num_kv_blocks=40, max_num_batched_tokens=33) as llm:
        return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in MODELS])
def test_log_probs_are_those_of_transformers_and_have_the_bits_of_the_trainer(checkpoint, name, dtype):
    directory = checkpoint(name.split()[0], getattr(torch, dtype), **MODELS[name])
    outputs = run(directory, dtype)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    trainer = exact.enable(AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)))
    for output in outputs:
        [sample], start = output.outputs, len(output.prompt_token_ids)
        ids = torch.tensor([output.prompt_token_ids + sample.token_ids])
        with torch.no_grad():
            logprobs = reference(ids).logits[0, :-1].log_softmax(-1)
            theirs = exact.token_logprobs(trainer, ids)[0].numpy()
        found = np.concatenate([np.asarray(output.prompt_logprobs)[1:], sample.logprobs])
        gap = np.abs(found - logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy())
        if dtype == "float32":
            assert gap.max() < 1e-4
        else:
            assert gap.mean() < 0.05
        assert np.array_equal(sample.logprobs, theirs[start - 1 :])


def test_queries_of_ministral_3_do_change_there(checkpoint):
    """The control: without the scale the log-probs are others from the original length on, and only there."""
    ropes = QUERIES | dict(llama_4_scaling_beta=0.0), QUERIES
    directories = [checkpoint("ministral3", **HEADS, rope_parameters=rope) for rope in ropes]
    plain, scaled = (np.asarray(run(each, "float32")[-1].prompt_logprobs)[1:] for each in directories)
    gap = np.abs(plain - scaled)
    assert gap[: ORIGINAL - 1].max() < 1e-4
    assert gap[ORIGINAL - 1 :].max() > 0.01
