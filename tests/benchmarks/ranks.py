"""Tokens per second of two ranks with a thread each, beside one process with two threads, in turns.

    python -m tests.benchmarks.ranks [--rounds 5] [--dtype float32]

A model as large as M of the other benchmarks generates for 32 prompts; ratios compare rounds that follow one another.
"""

import argparse
import statistics
import tempfile
import time

import torch

from rollout_engine import LLM, SamplingParams
from rollout_engine.testing import tiny_checkpoint

M = dict(
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=4096,
    std=0.05,
)
PROMPTS = [{"prompt_token_ids": [5 + (7 * i + j) % 900 for j in range(64)]} for i in range(32)]


def main() -> None:
    """Print tokens per second of each round, and the median of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = str(tiny_checkpoint(directory, "qwen3", **M))
        options = dict(dtype=arguments.dtype, skip_tokenizer_init=True, log_stats=False, num_kv_blocks=1024)
        two = LLM(path, tensor_parallel_size=2, num_threads=1, **options)
        one = LLM(path, num_threads=2, **options)
        try:
            print(two.collective_rpc("get_memory_usage"), one.collective_rpc("get_memory_usage"))
            ratios = [_round(one, two, number) for number in range(arguments.rounds)]
            print(f"median ratio {statistics.median(ratios):.2f}")
        finally:
            two.shutdown()
            one.shutdown()


def _round(one: LLM, two: LLM, number: int) -> float:
    speeds = [_tokens_per_second(engine, threads, number) for engine, threads in ((one, 2), (two, 1), (one, 2))]
    base = (speeds[0] + speeds[2]) / 2
    print(f"one {base:.0f}, two ranks {speeds[1]:.0f} tokens/s: {speeds[1] / base:.2f}")
    return speeds[1] / base


def _tokens_per_second(engine: LLM, num_threads: int, seed: int) -> float:
    torch.set_num_threads(num_threads)  # both engines compute in this process
    params = SamplingParams(max_tokens=48, ignore_eos=True, seed=seed, logprobs=0)
    start = time.perf_counter()
    engine.generate(PROMPTS, params, use_tqdm=False)
    return 48 * len(PROMPTS) / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
