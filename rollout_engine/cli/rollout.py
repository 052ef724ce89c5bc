"""Writes rollouts as JSON lines, one sample a line, group by group in the order of the prompts.

    rollout-engine rollout Qwen/Qwen3-0.6B --file prompts.jsonl --out rollouts.jsonl n=8 max_tokens=256

`rollout_engine.batches.jsonl` says what a line holds; other keys of a prompt's object in the file are its columns.
"""

import argparse
import sys
from pathlib import Path

import rollout_engine
from rollout_engine.cli.out_file import check_out
from rollout_engine.cli.overrides import add_overrides, parse_overrides
from rollout_engine.cli.prompts import add_prompts, read_prompts
from rollout_engine.cli.terminal import announce, sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rollout`."""
    parser.add_argument("model", help="checkpoint directory or hub id")
    add_prompts(parser)
    parser.add_argument("--out", type=Path, help="file to write, in place of what it had; standard output without it")
    add_overrides(parser)


def run(arguments: argparse.Namespace) -> None:
    """Roll out every prompt and write one line per sample."""
    overrides, given = parse_overrides(arguments.overrides), read_prompts(arguments)
    if arguments.out is not None:
        check_out(arguments.out, "rollouts.jsonl")
    params = rollout_engine.SamplingParams(**overrides.sampling)
    with announce(f"loading {arguments.model}"):
        policy = rollout_engine.RolloutPolicy.from_pretrained(arguments.model, **overrides.engine)
    with policy, sampling(len(given), "prompt") as shown:
        names = dict.fromkeys(name for each in given for name in each.columns)
        columns = {name: [each.columns.get(name) for each in given] for name in names}
        batch = policy.rollout([each.prompt for each in given], params, columns=columns, use_tqdm=shown)
    rollout_engine.to_jsonl(batch, arguments.out or sys.stdout)
    if arguments.out is not None:
        print(f"{batch.shape[0]} samples in {arguments.out}", file=sys.stderr)
