"""Write rollouts as JSON lines, one sample a line, group by group in the order of the prompts.

    rollout-engine rollout Qwen/Qwen3-0.6B --file prompts.jsonl --out rollouts.jsonl n=8 max_tokens=256

A line holds group_id, sample_index, seed, finish_reason, prompt, response, and, of the prompt and of the response,
token ids; of the response also log_probs, policy_version and kv_min_version, one per token.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rollout_engine
from rollout_engine.cli.overrides import add_overrides, parse_overrides
from rollout_engine.cli.prompts import add_prompts, read_prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `rollout` takes."""
    parser.add_argument("model", help="checkpoint directory or hub id")
    add_prompts(parser)
    parser.add_argument("--out", type=Path, help="file to write; standard output without it")
    add_overrides(parser)


def run(arguments: argparse.Namespace) -> None:
    """Roll out every prompt and write one line per sample."""
    overrides, prompts = parse_overrides(arguments.overrides), read_prompts(arguments)
    params = rollout_engine.SamplingParams(**overrides.sampling)
    with rollout_engine.RolloutPolicy.from_pretrained(arguments.model, **overrides.engine) as policy:
        batch = policy.rollout(prompts, params, use_tqdm=sys.stderr.isatty())
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(arguments.out.open("w", encoding="utf-8")) if arguments.out else sys.stdout
        for line in _lines(batch):
            print(json.dumps(line, ensure_ascii=False), file=out)


def _lines(batch: Any) -> Iterator[dict[str, Any]]:
    for i, row in enumerate(batch):
        sampled, prompt = row["masks", "all_assistant_mask"], row["masks", "all_attention_mask"].clone()
        prompt[sampled] = False
        yield {
            "group_id": int(row["group_id"]),
            "sample_index": int(row["sample_index"]),
            "seed": int(row["seed"]) % 2**64,
            "finish_reason": batch["finish_reason"][i],
            "prompt": batch["text", "prompt"][i],
            "response": batch["text", "response"][i],
            "prompt_token_ids": row["tokens", "full"][prompt].tolist(),
            "response_token_ids": row["tokens", "full"][sampled].tolist(),
            "log_probs": row["log_probs", "full"][sampled].tolist(),
            "policy_version": row["policy_version"][sampled].tolist(),
            "kv_min_version": row["kv_min_version"][sampled].tolist(),
        }
