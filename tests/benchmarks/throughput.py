"""Tokens per second of this engine beside Hugging Face `generate`, alternating in one process.

    python tests/benchmarks/throughput.py M --rounds 3 --out tests/benchmarks/results/cpu/throughput.json

Random weights, temperature 1, `ignore_eos`, log-probs of the sampled tokens on in the engine (`generate` gives none
unless asked and is not). Prompts are new in every round. Medians over rounds; ratios are within a round.
"""

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, SamplingParams
from rollout_engine.testing import tiny_checkpoint

SHAPES = {
    "S": dict(
        dtype=torch.float32, num_hidden_layers=4, hidden_size=128, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=384, vocab_size=4096,
    ),
    "M": dict(
        dtype=torch.bfloat16, num_hidden_layers=12, hidden_size=768, num_attention_heads=12, num_key_value_heads=4,
        head_dim=64, intermediate_size=2048, vocab_size=4096,
    ),
}  # fmt: skip
WORK = {"S": (8, 8, 64, 128), "M": (8, 8, 64, 64)}
"""Prompts, samples of each, prompt tokens, sampled tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        tiny_checkpoint(directory, "qwen3", std=0.02, **SHAPES[args.shape])
        result = measure(directory, args.shape, args.rounds)
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def measure(directory: str, shape: str, rounds: int) -> dict[str, object]:
    num_prompts, num_samples, num_prompt, num_sampled = WORK[shape]
    reference = AutoModelForCausalLM.from_pretrained(directory)
    params = SamplingParams(n=num_samples, max_tokens=num_sampled, ignore_eos=True, logprobs=0, detokenize=False)
    rng = random.Random(0)
    ours, theirs = [], []
    with LLM(directory, log_stats=False) as llm:
        for i in range(rounds + 1):  # the first round warms both up
            prompts = [[rng.randrange(3, 4096) for _ in range(num_prompt)] for _ in range(num_prompts)]
            one = _seconds(lambda p=prompts: llm.generate(p, params, use_tqdm=False))
            two = _seconds(lambda p=prompts: _generate(reference, p, num_samples, num_sampled))
            if i:
                ours.append(num_prompts * num_samples * num_sampled / one)
                theirs.append(num_prompts * num_samples * num_sampled / two)
    return {
        "work": f"{shape} {num_prompts}x{num_samples}, {num_prompt}+{num_sampled}",
        "engine_tokens_per_second": round(statistics.median(ours), 1),
        "generate_tokens_per_second": round(statistics.median(theirs), 1),
        "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3),
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "cpu": _cpu(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": f"python tests/benchmarks/throughput.py {shape} --rounds {rounds}",
    }


def _generate(model: torch.nn.Module, prompts: list[list[int]], num_samples: int, num_sampled: int) -> None:
    model.generate(
        torch.tensor(prompts), do_sample=True, top_k=0, num_return_sequences=num_samples,
        min_new_tokens=num_sampled, max_new_tokens=num_sampled,
    )  # fmt: skip


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"


if __name__ == "__main__":
    main()
