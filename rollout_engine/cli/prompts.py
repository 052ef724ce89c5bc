"""Reads prompts given on the command line, one by one or in a file."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.text.conversations import PROMPT_KINDS
from rollout_engine.text.prompts import PROMPT_KEYS


class GivenPrompt(NamedTuple):
    """A prompt, and the other keys of its object in the file."""

    prompt: Any
    columns: dict[str, Any]
    """Keys that do not belong to a prompt, for example "answer". Empty for text."""


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Add `--prompt` and `--file` to `parser`."""
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given many times")
    parser.add_argument(
        "--file",
        type=Path,
        help="one prompt a line: text; or, in a file named *.jsonl, a JSON string, a list of token ids, or an object "
        '{"prompt": ...}, {"prompt_token_ids": ...} or {"messages": ...}, whose other keys, as "answer", are columns: '
        "they are written beside the samples where these are JSON",
    )


def read_prompts(arguments: argparse.Namespace) -> list[GivenPrompt]:
    """All prompts in the order given. Raises `RequestError` if there are none."""
    prompts = [GivenPrompt(text, {}) for text in arguments.prompt]
    prompts += _read(arguments.file) if arguments.file else ()
    if not prompts:
        raise RequestError("There are no prompts: give --prompt TEXT or --file FILE.")
    return prompts


def _read(path: Path) -> list[GivenPrompt]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as problem:
        raise RequestError(f"--file {path} cannot be read: {problem.strerror}. Give the path of a text file.") from None
    except UnicodeDecodeError as problem:
        raise RequestError(f"--file {path} cannot be read: {problem}. Give a text file in UTF-8.") from None
    if path.suffix != ".jsonl":
        return [GivenPrompt(line, {}) for line in lines]
    return [_decode_line(f"{path}, prompt {i}", line) for i, line in enumerate(lines)]


def _decode_line(where: str, line: str) -> GivenPrompt:
    try:
        prompt = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as problem:
        raise RequestError(f"{where}: not JSON ({problem}).") from None
    if not isinstance(prompt, dict):
        return GivenPrompt(prompt, {})
    if not set(PROMPT_KINDS) & set(prompt):
        keys = ", ".join(prompt) or "none"
        raise RequestError(
            f"{where}: no prompt. It needs one of the keys {', '.join(PROMPT_KINDS)}; it has {keys:.80}."
        )
    columns = {key: value for key, value in prompt.items() if key not in PROMPT_KEYS}
    return GivenPrompt({key: value for key, value in prompt.items() if key in PROMPT_KEYS}, columns)
