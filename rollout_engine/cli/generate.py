"""Prints completions of prompts.

rollout-engine generate Qwen/Qwen3-0.6B --prompt "2 + 2 =" temperature=0 max_tokens=16
rollout-engine generate path --file questions.jsonl --chat --json n=4 logprobs=0
rollout-engine generate Qwen/Qwen3-VL-2B-Instruct --prompt "Describe it." --image photo.jpg --chat
"""

import argparse
import json
from pathlib import Path
from typing import Any

import rollout_engine
from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.cli.overrides import add_overrides, parse_overrides
from rollout_engine.cli.prompts import add_prompts, read_prompts
from rollout_engine.cli.terminal import announce, sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `generate`."""
    parser.add_argument("model", help="checkpoint directory or hub id")
    add_prompts(parser)
    parser.add_argument("--chat", action="store_true", help="each text prompt is one user message")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="a picture of each text prompt; needs --chat"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt, a line each")
    add_overrides(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print every sample of every prompt, in order."""
    overrides, given = parse_overrides(arguments.overrides), read_prompts(arguments)
    params = rollout_engine.SamplingParams(**overrides.sampling)
    prompts = [each.prompt for each in given]
    if arguments.image and not arguments.chat:
        raise RequestError("--image needs --chat, by which the chat template places pictures in the prompt.")
    if arguments.chat:
        prompts = [_user_message(p, arguments.image) if isinstance(p, str) else p for p in prompts]
    with announce(f"loading {arguments.model}"):
        llm = rollout_engine.LLM(arguments.model, **overrides.engine)
    with llm, sampling(len(prompts), "prompt") as shown:
        results = llm.generate(prompts, params, use_tqdm=shown)
    for each, result in zip(given, results, strict=True):
        if arguments.json:
            print(json.dumps(_as_json(result, each.columns), ensure_ascii=False))
        else:
            _print(result)


def _user_message(text: str, images: list[str]) -> dict[str, Any]:
    """The prompt of one message of a user, with the pictures of these files before its text."""
    parts: list[dict[str, Any]] = [{"type": "image", "image": Path(image)} for image in images]
    content: Any = [*parts, {"type": "text", "text": text}] if images else text
    return {"messages": [{"role": "user", "content": content}]}


def _print(result: RequestOutput) -> None:
    print(f"\n{result.prompt_token_ids if result.prompt is None else result.prompt}")
    for sample in result.outputs:
        shown = repr(sample.text) if sample.text else sample.token_ids
        total = "" if sample.cumulative_logprob is None else f", log-prob {sample.cumulative_logprob:.2f}"
        print(f"  [{sample.index}: {sample.finish_reason}{total}] {shown}")


def _as_json(result: RequestOutput, columns: dict[str, Any]) -> dict[str, Any]:
    return {
        "columns": columns,
        "prompt": result.prompt,
        "prompt_token_ids": result.prompt_token_ids,
        "samples": [_sample_as_json(sample) for sample in result.outputs],
    }


def _sample_as_json(sample: CompletionOutput) -> dict[str, Any]:
    return {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "logprobs": None if sample.logprobs is None else sample.logprobs.tolist(),
        "finish_reason": sample.finish_reason,
        "seed": sample.seed,
        "error": sample.error,
    }
