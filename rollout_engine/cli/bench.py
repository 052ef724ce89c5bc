"""Measures tokens per second of a model on random prompts, and the share of what memory and arithmetic allow.

    rollout-engine bench Qwen/Qwen3-0.6B --prompts 4 --prompt-tokens 64 n=4 max_tokens=32
    rollout-engine bench path/of/config --json load_format=dummy dtype=bfloat16

Every completion has max_tokens tokens (64 unless given), n samples a prompt (8), log-probs on. Prompts are new in every
round, so nothing is found in the prefix cache. One round warms up; the figure is the median of the others.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig

import rollout_engine
from rollout_engine.base.errors import RequestError
from rollout_engine.base.locations import find_directory
from rollout_engine.cli import ceilings, machine
from rollout_engine.cli.overrides import add_overrides, parse_overrides
from rollout_engine.cli.terminal import announce

SAMPLING = {"n": 8, "max_tokens": 64, "ignore_eos": True, "logprobs": 0, "detokenize": False}
"""Sampling settings of a measured round, unless others are given."""
_ENGINE = {"skip_tokenizer_init": True, "log_stats": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bench`."""
    parser.add_argument(
        "model", help="checkpoint directory or hub id; with load_format=dummy its config.json is enough"
    )
    parser.add_argument("--prompts", type=_count, default=8, help="prompts per round (8)")
    parser.add_argument("--prompt-tokens", type=_count, default=64, help="tokens of each (64)")
    parser.add_argument("--rounds", type=_count, default=3, help="measured rounds (3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_overrides(parser)


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not '{text}'")
    return number


def run(arguments: argparse.Namespace) -> None:
    """Measure the model and print the result."""
    overrides = parse_overrides(arguments.overrides)
    params = rollout_engine.SamplingParams(**(SAMPLING | overrides.sampling))
    if params.max_tokens is None:
        raise RequestError.for_field("max_tokens", None, "a number: every completion gets as many tokens")
    work = ceilings.Work(arguments.prompts, params.n, arguments.prompt_tokens, params.max_tokens)
    ceilings.dimensions_of(arguments.model, torch.float32)  # raises an error before anything is loaded
    with announce(f"loading {arguments.model}"):
        llm = rollout_engine.LLM(arguments.model, **(_ENGINE | overrides.engine))
    with llm:
        dtype = next(iter(llm.get_model_metadata().values()))[0]
        rates = list(_rounds(llm, arguments.model, work, params, arguments.rounds))
    limits = ceilings.measure(arguments.model, getattr(torch, dtype), work)
    reached = statistics.median(rates)
    result = {
        "model": arguments.model,
        "work": str(work),
        "dtype": dtype,
        "tokens_per_second": round(reached, 1),
        "rounds": [round(rate, 1) for rate in rates],
        **limits._asdict(),
        **limits.shares(reached),
        "machine": machine.describe(),
        "versions": machine.versions(("torch", "transformers")),
    }
    print(json.dumps(result, indent=1) if arguments.json else _table(result))


def _rounds(llm: Any, model: str, work: ceilings.Work, params: Any, rounds: int) -> Iterator[float]:
    """Tokens per second of each round after the first."""
    source = random_prompts(model, work.num_prompts, work.num_prompt_tokens)
    for i in tqdm(range(rounds + 1), desc="bench", unit="round", delay=2, disable=not sys.stderr.isatty()):
        prompts = next(source)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        if i:
            yield work.num_tokens / (time.perf_counter() - start)


def random_prompts(model: str, num_prompts: int, num_tokens: int) -> Iterator[list[list[int]]]:
    """Yield prompts of random tokens of a model's vocabulary again and again, new ones each time.

    They are the same in every process. `model`: checkpoint directory or hub id.
    """
    config = AutoConfig.from_pretrained(find_directory(model, weights=False), trust_remote_code=False)
    vocab_size, source = config.get_text_config().vocab_size, random.Random(0)
    while True:
        yield [[source.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(num_prompts)]


def _table(result: dict[str, Any]) -> str:
    where = result["machine"]
    return (
        f"{result['model']}, {result['work']}, {result['dtype']}, {where['threads']} threads of {where['cpu']}\n"
        f"{result['tokens_per_second']:12,.0f}  tokens/s\n"
        f"{result['tokens_per_second_by_gemm']:12,.0f}  limit of matrix products "
        f"({result['gemm_gflop_per_s']:,.0f} GFLOP/s): {result['share_of_gemm']:.0%} reached\n"
        f"{result['tokens_per_second_by_reading']:12,.0f}  limit of memory reads "
        f"({result['read_gb_per_s']:,.1f} GB/s): {result['share_of_reading']:.0%} reached"
    )
