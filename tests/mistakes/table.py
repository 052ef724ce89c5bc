"""Runs the mistakes of `tests.mistakes.rows` and writes what each says as a table in Markdown."""

import contextlib
import io
import logging
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from copy import deepcopy
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

import envs_adapters
import rollout_engine
from rollout_engine.cli.main import main
from rollout_engine.testing import tiny_checkpoint
from tests.unit.fleet.fake_fleet import make_service

PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"
FOLDER = "/path/to"
"""Stands for the folder of the run in what is printed."""

_HEAD = """# What it says when something is wrong

Every line was run: `python -m tests.mistakes --write` writes this page, and a test compares it with today's.

`path` is a checkpoint in `folder`, `llm = LLM(path)`, `policy = RolloutPolicy(llm)`, `service` a `RolloutService` of
two replicas, `trainer` is transformers' model of that checkpoint and `batch` a rollout. `/path/to` stands for a folder,
N for a number that varies. What begins with `$` was typed at a shell. A warning is logged, and the call goes on.
"""


class Mistake(NamedTuple):
    """Something that a user may type. Whichever of its lines fails first, or warns, is what the table shows."""

    group: str
    code: str
    """Python, or after "$ " a command line."""
    before: str = ""
    """What makes it a mistake and is no part of it; not shown."""
    after: str = ""
    """What puts the engine right again; not shown."""
    varies: str = ""
    """A regular expression of what is different in every run; it is shown as N."""


class Row(NamedTuple):
    """A line of the table."""

    group: str
    code: str
    answer: str


@contextlib.contextmanager
def scene(folder: Path) -> Iterator[dict[str, Any]]:
    """The names that mistakes use: one engine, one trainer, one batch."""
    path = str(tiny_checkpoint(folder / "tiny"))
    torch.set_num_threads(1)
    service, _ = make_service()
    with service, rollout_engine.LLM(path, num_kv_blocks=256, log_stats=False) as llm:
        names = {name: getattr(rollout_engine, name) for name in rollout_engine.__all__}
        policy = rollout_engine.RolloutPolicy(llm)
        trainer = AutoModelForCausalLM.from_pretrained(path)
        batch = policy.rollout(
            ["2 + 2 =", "The sky is"], num_samples=2, sampling_params={"max_tokens": 4}, use_tqdm=False
        )
        yield names | {
            "path": path,
            "folder": str(folder),
            "llm": llm,
            "policy": policy,
            "trainer": trainer,
            "batch": batch,
            "torch": torch,
            "deepcopy": deepcopy,
            "write": lambda name, text: (folder / name).write_text(text),
            "remove": lambda name: (folder / name).unlink(),
            "rollout_engine": rollout_engine,
            "service": service,
            "make_env": envs_adapters.make_env,
            "Observation": envs_adapters.Observation,
        }


def rows(mistakes: list[Mistake], names: dict[str, Any]) -> list[Row]:
    """Make every mistake, in its order."""
    return [Row(each.group, each.code, _answer(each, dict(names))) for each in mistakes]


def page(table: list[Row]) -> str:
    """The whole page."""
    parts = [_HEAD]
    for group, members in groupby(table, lambda row: row.group):
        parts += [f"\n## {group}\n\n| you type | it says |\n|---|---|\n"]
        parts += [f"| {_cell(row.code)} | {_cell(row.answer)} |\n" for row in members]
    return "".join(parts)


def _answer(mistake: Mistake, names: dict[str, Any]) -> str:
    folder = names["folder"]
    if mistake.code.startswith("$ "):
        said = _shell(mistake, names)
    else:
        said = _python(mistake, names)
    return re.sub(mistake.varies, "N", said.replace(folder, FOLDER)) if mistake.varies else said.replace(folder, FOLDER)


def _python(mistake: Mistake, names: dict[str, Any]) -> str:
    """The error that the code raises; what it warns of, where it raises none."""
    exec(mistake.before, names)
    heard: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rollout_engine")
    logger.addHandler(listener)
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("always")
            exec(mistake.code, names)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        logger.removeHandler(listener)
        exec(mistake.after, names)
    heard += [str(warning.message) for warning in caught]
    return "warning: " + "\n".join(heard) if heard else ""


def _shell(mistake: Mistake, names: dict[str, Any]) -> str:
    """What a command prints last on its standard error."""
    exec(mistake.before, names)
    program, *arguments = shlex.split(mistake.code.removeprefix("$ "))
    variables = {}
    while "=" in program:
        variables |= [program.split("=", 1)]
        program, *arguments = arguments
    if program == "python":
        command, environment = [sys.executable, *arguments], os.environ | variables
        done = subprocess.run(command, cwd=names["folder"], env=environment, capture_output=True, text=True)
        return done.stderr.splitlines()[-1]
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.suppress(SystemExit), contextlib.chdir(names["folder"]):
        main(arguments)
    return printed.getvalue().splitlines()[-1]


def _cell(text: str) -> str:
    """Lines of code in a cell of a table."""
    return "<br>".join(_span(line) for line in text.splitlines())


def _span(line: str) -> str:
    quote = "``" if "`" in line else "`"
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{quote}{space}{line}{space}{quote}".replace("|", "\\|")
