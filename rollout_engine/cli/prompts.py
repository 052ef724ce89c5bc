"""Prompts from the command line: given one by one, or in a file."""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from rollout_engine.errors import RequestError


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Let `parser` take `--prompt` and `--file`."""
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given many times")
    parser.add_argument(
        "--file",
        type=Path,
        help="one prompt a line: text; or, in a file named *.jsonl, a JSON string, a list of token ids, or an object "
        '{"prompt": ...}, {"prompt_token_ids": ...} or {"messages": ...}',
    )


def read_prompts(arguments: argparse.Namespace) -> list[Any]:
    """All prompts, in the order given; raises `RequestError` without any."""
    prompts = [*arguments.prompt, *(_read(arguments.file) if arguments.file else ())]
    if not prompts:
        raise RequestError("There are no prompts: give --prompt TEXT or --file FILE.")
    return prompts


def _read(path: Path) -> list[Any]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as problem:
        raise RequestError(f"--file {path} cannot be read: {problem}") from None
    return [_decoded(path, i, line) for i, line in enumerate(lines)] if path.suffix == ".jsonl" else lines


def _decoded(path: Path, index: int, line: str) -> Any:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as problem:
        raise RequestError(f"{path}, prompt {index}: not JSON ({problem}).") from None
