"""Processed log-probs over supports, of engine and trainer: groups, drafts, chunks, preemption, a negative control.

SUPPORT_FUZZ_TOKENS=50000 python -m pytest tests/parity/test_supports.py -m slow -s
"""

import os
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import RolloutPolicy, SamplingParams, SpeculationConfig, exact

pytestmark = pytest.mark.slow
NUM_TOKENS = int(os.environ.get("SUPPORT_FUZZ_TOKENS", "4000"))
RULES = {
    "top_p": dict(top_p=0.9),
    "top_k": dict(top_k=20),
    "min_p": dict(min_p=0.05),
    "all": dict(top_p=0.9, top_k=20, min_p=0.05),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rules", RULES)
def test_no_token_differs(sized_checkpoint, rules, dtype):
    directory = sized_checkpoint("qwen3", dtype, std=0.06 if dtype == torch.float32 else 0.2)  # flat, and sharp
    rng = random.Random(f"{rules} {dtype}")
    trainer = exact.enable(AutoModelForCausalLM.from_pretrained(directory, dtype=dtype))
    params = SamplingParams(
        temperature=0.7, max_tokens=64, logprobs_mode="processed", return_support=True, **RULES[rules]
    )
    num_tokens, round = 0, 0
    options = dict(dtype=str(dtype).removeprefix("torch."), log_stats=False, max_model_len=256)
    options |= dict(num_kv_blocks=40, block_size=16, max_num_batched_tokens=50, speculation=SpeculationConfig())
    with RolloutPolicy.from_pretrained(directory, **options) as policy:
        while num_tokens < NUM_TOKENS:
            prompts = [[rng.randrange(3, 259) for _ in range(rng.randint(1, 60))] for _ in range(8)]
            layout = rng.choice(["padded", "packed"])
            batch = policy.rollout(prompts, params, num_samples=4, seed=round, layout=layout, use_tqdm=False)
            with torch.no_grad():
                report = exact.check(batch, exact.token_logprobs(trainer, batch))
            assert report.is_exact, str(report)
            num_tokens, round = num_tokens + report.num_tokens, round + 1
        counts = torch.cat([torch.from_numpy(each.counts) for each in batch.get("support").tolist()])
        assert (counts > 0).any() and (counts < 259).all()
        with torch.no_grad():
            ids, mask = batch["tokens", "full"].clone(), batch["masks", "all_attention_mask"]
            given = dict(cu_seqlens=batch["cu_seqlens"]) if layout == "packed" else dict(attention_mask=mask)
            whole = exact.token_logprobs(trainer, ids, **given, temperature=0.7)
        control = exact.check(batch, whole)
        assert control.num_different > 0 and "support" in control.cause
    print(f"{rules} {dtype}: {num_tokens} tokens, 0 differ; mean support {counts[counts > 0].double().mean():.1f} ids")
