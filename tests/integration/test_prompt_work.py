"""A prompt is computed once: for its n samples, and for the next request that shares it."""

import time

import pytest

from rollout_engine import LLM, SamplingParams
from rollout_engine.testing import tiny_checkpoint


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=4, hidden_size=128))


def test_sixteen_samples_compute_the_prompt_once(directory):
    with LLM(directory, log_stats=False) as llm:
        prompt = list(range(3, 203))
        llm.generate([prompt], SamplingParams(n=16, max_tokens=5, ignore_eos=True), use_tqdm=False)
        assert llm.llm_engine.stats.num_prompt_tokens_computed == len(prompt)


def test_a_known_prompt_is_at_its_first_token_after_a_block(directory):
    with LLM(directory, log_stats=False, max_num_batched_tokens=1024, block_size=16) as llm:
        stats = llm.frontend.client.driver.core.stats
        prompts = [[3 + (7 * i + k * k) % 250 for k in range(1024)] for i in range(4)]
        spent = []
        for _ in range(2):
            before = stats.num_steps, stats.num_prompt_tokens_computed
            llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
            spent.append((stats.num_steps - before[0], stats.num_prompt_tokens_computed - before[1]))
        assert spent == [(4, 4 * 1024), (1, 4 * 16)]


@pytest.mark.slow
def test_a_known_prompt_reaches_its_first_token_ten_times_sooner(directory):
    with LLM(directory, log_stats=False, max_num_batched_tokens=1024) as llm:
        params = SamplingParams(max_tokens=1)
        llm.generate([[9] * 1024], params, use_tqdm=False)
        pairs = []
        for trial in range(5):
            prompts = [[3 + (7 * i + 13 * trial + k * k) % 250 for k in range(1024)] for i in range(4)]
            pairs.append([_seconds(llm, prompts, params) for _ in range(2)])
        cold, warm = map(min, zip(*pairs, strict=True))
        assert cold / warm >= 10, pairs


def _seconds(llm, prompts, params):
    """Of this process's own work: what else the machine does counts nothing."""
    start = time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    return time.process_time() - start
