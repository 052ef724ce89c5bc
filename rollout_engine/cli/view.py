"""Rollouts to look at, in the terminal or as one HTML page: to filter, sort, open, colour by token, and compare.

    rollout-engine view rollouts.jsonl
    rollout-engine view runs/grpo --html page.html --tokenizer Qwen/Qwen3-0.6B

The page needs no network, the terminal the extra [view]. The files are those of `rollout(log_to=...)` and `to_jsonl`;
of a directory all that are named rollouts*.jsonl, or samples.jsonl as an evaluation's is, at any depth.
"""

import argparse
from pathlib import Path
from typing import Any

from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.base.locations import describe_missing
from rollout_engine.base.outputs import TokenTexts
from rollout_engine.batches.rollout_files import read_jsonl
from rollout_engine.cli.terminal import require_terminal
from rollout_engine.looking.page import write_page
from rollout_engine.looking.samples import TokenText, viewed
from rollout_engine.rollouts.evaluation.ledger import SAMPLES
from rollout_engine.text.tokenizer import TextCodec

try:
    from rollout_engine.looking.terminal import RolloutViewer
except ModuleNotFoundError:  # the extra is not installed
    RolloutViewer = None  # type: ignore[assignment,misc]

_NAMES = ("rollouts*.jsonl", SAMPLES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `view`."""
    parser.add_argument("path", type=Path, help="a file of rollouts, or a directory with some")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page, and open nothing")
    parser.add_argument(
        "--tokenizer", help="for the texts of tokens: a directory or hub id; default: that of the model of the lines"
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the page, or open the view in the terminal."""
    paths = _files(arguments.path)
    if arguments.html is None:
        _require_view()
    samples = [sample for path in paths for sample in read_jsonl(path)]
    if not samples:
        raise RequestError(f"{arguments.path} has no rollouts.")
    texts = _token_texts(arguments.tokenizer, samples)
    title = f"Rollouts of {arguments.path}"
    if arguments.html is None:
        RolloutViewer(viewed(samples, texts), title).run()
        return
    try:
        write_page(samples, arguments.html, title=title, token_text=texts)
    except OSError as problem:
        hint = f"{problem}."
        raise RequestError.for_field("--html", str(arguments.html), "a file that can be written", hint) from problem
    print(f"{arguments.html}: {len(samples)} samples of {len(paths)} files; open it in a browser")


def _require_view() -> None:
    if RolloutViewer is None:
        advice = 'pip install "rollout-engine[view]", or write a page with --html FILE'
        raise ConfigError(f"Looking in the terminal needs the packages rich and textual: {advice}.")
    require_terminal("write a page with --html FILE")


def _files(path: Path) -> list[Path]:
    if not path.exists():
        hint = f"{describe_missing(path)}.".replace("?.", "?")
        raise RequestError.for_field("path", str(path), "a file of rollouts, or a directory with some", hint)
    if not path.is_dir():
        return [path]
    found = sorted(file for name in _NAMES for file in path.rglob(name))
    if not found:
        raise RequestError.for_field("path", str(path), f"a directory with files named {' or '.join(_NAMES)}")
    return found


def _token_texts(given: str | None, samples: list[dict[str, Any]]) -> TokenText:
    """Texts of tokens by the tokenizer that was given, or by that of the logged model if it still exists."""
    name = given or samples[0].get("engine", {}).get("model")
    if name is None:
        return lambda token_id: None
    try:
        return TokenTexts(TextCodec.from_pretrained(name).hf).__getitem__
    except ConfigError as problem:
        if given:
            raise
        print(f"Tokens are shown as numbers, for want of a tokenizer (--tokenizer): {problem}")
        return lambda token_id: None
