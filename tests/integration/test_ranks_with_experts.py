"""Routed experts where a mixture is cut over ranks: recorded and replayed as by one process, to the bit."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, SamplingParams
from rollout_engine.model.modules.routers import routers_of
from rollout_engine.testing import tiny_checkpoint
from rollout_engine.testing.architectures import sizes_of

PROMPTS = [list(range(3, 40)), [5, 6], list(range(3, 40)) + [9, 8]]
PARAMS = SamplingParams(max_tokens=9, n=2, seed=3, logprobs=0, ignore_eos=True, return_routed_experts=True)
OPTIONS = dict(num_threads=1, log_stats=False, max_model_len=512, skip_tokenizer_init=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "decoder"),
    [
        ("qwen3_moe", "compiled"),
        ("mixtral", "compiled"),
        ("gpt_oss", "modules"),
        ("gemma4_text_experts", "modules"),
        ("longcat_flash", "modules"),
        ("qwen3_5_moe_text", "modules"),
    ],
)
def test_ranks_record_and_replay_the_experts_of_one_process(tmp_path, name, decoder):
    architecture, sizes = sizes_of(name)
    checkpoint = str(tiny_checkpoint(tmp_path, architecture, **sizes))
    moved = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        for index, router in enumerate(routers_of(moved)):
            matrix = next(parameter for parameter in router.parameters() if parameter.dim() == 2)
            noise = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(index))
            matrix.copy_(noise * matrix.std())
    found = []
    for size in (1, 2):
        with LLM(checkpoint, tensor_parallel_size=size, **OPTIONS) as llm:
            assert f"decoder {decoder}" in llm.frontend.client.info.choices
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            samples = [(output, sample) for output in outputs for sample in output.outputs]
            experts = [sample.routed_experts for _, sample in samples]
            pairs = [output.prompt_token_ids for output, _ in samples], [list(s.token_ids) for _, s in samples]
            llm.update_weights(moved)
            scores = llm.score(*pairs), llm.score(*pairs, routed_experts=experts)
            found.append((pairs, experts, [s.logprobs for _, s in samples], *scores))
    (pairs, experts, logprobs, plain, replayed), theirs = found
    assert pairs == theirs[0]
    for ours, other in zip((experts, logprobs, plain, replayed), theirs[1:], strict=True):
        assert all(np.array_equal(one, two) for one, two in zip(ours, other, strict=True))
    assert not any(np.array_equal(one, two) for one, two in zip(plain, replayed, strict=True))
