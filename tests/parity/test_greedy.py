"""Greedy text is Hugging Face `generate`'s; where it departs, the two best logits were a tie."""

import random
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, SamplingParams

TIE = 1e-5

pytestmark = pytest.mark.usefixtures("own_products")


@pytest.mark.parametrize(
    "architecture", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen2"))]
)
def test_greedy_tokens_are_those_of_generate(checkpoint, architecture):
    directory = checkpoint(architecture)
    rng = random.Random(architecture)
    prompts = [[rng.randrange(3, 259) for _ in range(length)] for length in (1, 2, 9, 16, 31, 64, 65, 100, 200)]
    with LLM(str(directory), log_stats=False, max_num_batched_tokens=96) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
        assert llm.frontend.client.driver.executor.worker.runner.model.decoder is not None, (
            "the compiled layers should be tried"
        )
    reference = AutoModelForCausalLM.from_pretrained(directory)
    ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        ties += assert_same(reference, prompt, output.outputs[0].token_ids)
    if ties:
        warnings.warn(f"{architecture}: {ties} of {len(prompts)} texts departed at a tie", stacklevel=1)


def assert_same(reference, prompt, ours) -> bool:
    """Whether they departed at a tie; any other difference fails."""
    with torch.no_grad():
        full = reference.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0].tolist()
    theirs = full[len(prompt) :]
    if ours == theirs:
        return False
    place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + theirs[:place]])).logits[0, -1]
    gap = (logits[theirs[place]] - logits[ours[place]]).abs().item()
    assert gap <= TIE, f"token {place}: {ours[place]} instead of {theirs[place]}, {gap} apart"
    return True
