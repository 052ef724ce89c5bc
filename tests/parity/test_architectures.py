"""Every common architecture, whole: greedy tokens and log-probs are those of Hugging Face's own eager forward.

The engine is made to work for it: prompts in chunks, a pool so small that requests are preempted, a shared prefix,
windows shorter than the prompts.
"""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, SamplingParams
from rollout_engine.testing import assert_clean
from rollout_engine.testing.architectures import SIZES, VARIANTS

TIE = 1e-4
"""Logits closer than this may be ranked either way."""
NUM_TOKENS = 24
QUICK = "llama mistral phi3 gemma2 gpt_neox gpt2 mixtral gpt_oss cohere opt glm deepseek_v3".split()
"""Architectures that differ most from one another."""


def draw_prompts(seed):
    """Prompts of very different lengths; the last continues another one's first 64 tokens."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 259) for _ in range(length)] for length in (1, 9, 31, 70, 40)]
    return [*prompts, prompts[3][:64] + [9, 8]]


@torch.no_grad()
def reference_logits(reference, prompt, token_ids):
    """Logits [len(token_ids), V] that each of `token_ids` was to be chosen from."""
    logits = reference(torch.tensor([prompt + token_ids])).logits[0].float()
    return logits[len(prompt) - 1 : -1]


@torch.no_grad()
def generated(reference, prompt):
    """What `generate` continues `prompt` with, up to the first tie."""
    reference.generation_config.eos_token_id = None
    out = reference.generate(
        torch.tensor([prompt]),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.logits).topk(2).values
    ties = (best[:, 0] - best[:, 1] < TIE).nonzero()
    return out.sequences[0, len(prompt) :].tolist()[: int(ties[0]) if len(ties) else None]


def assert_transformers_tokens(directory, architecture):
    """Compare greedy tokens and their log-probs, in chunks, with preemption and with prefix hits."""
    prompts = draw_prompts(architecture)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    small = dict(max_num_batched_tokens=33, num_kv_blocks=16, block_size=16, max_model_len=128)
    with LLM(str(directory), log_stats=False, **small) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.llm_engine.stats.num_preemptions > 0
        again = llm.generate([prompts[3]], params, use_tqdm=False)[0]
        assert again.num_cached_tokens > 0
        assert again.outputs[0].token_ids == outputs[3].outputs[0].token_ids
        assert_clean(llm.llm_engine)
    reference = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    for prompt, output in zip(prompts, outputs, strict=True):
        sample = output.outputs[0]
        logits = reference_logits(reference, prompt, sample.token_ids)
        chosen = torch.tensor(sample.token_ids)[:, None]
        assert (logits.amax(-1) - logits.gather(1, chosen)[:, 0]).max() < TIE
        expected = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        torch.testing.assert_close(torch.from_numpy(sample.logprobs), expected, atol=1e-4, rtol=0)
    theirs = generated(reference, prompts[3])
    assert theirs
    assert outputs[3].outputs[0].token_ids[: len(theirs)] == theirs


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "architecture",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in (*SIZES, *VARIANTS)],
)
def test_tokens_and_log_probs_are_those_of_transformers(sized_checkpoint, architecture):
    assert_transformers_tokens(sized_checkpoint(architecture), architecture)
