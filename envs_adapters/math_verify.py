"""Mathematics judged by math-verify: one problem, one answer, and 1 if it equals the row's.

    make_env("math_verify:math500.jsonl", prompt_column="problem")
    make_env("math_verify", rows=[{"prompt": "Solve x^2 = 2.", "answer": "\\pm\\sqrt{2}"}, ...])

Rows are those of "dataset:PATH". Environments run in worker processes, in which math-verify can end a comparison that
takes more than five seconds; it then counts as wrong. With rewards of your own:

    rewards = ["envs_adapters.math_verify:score", "mine:is_short"]
    make_env("dataset:math.jsonl", reward_fn=rewards, placement="processes")
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from envs_adapters.dataset import DatasetEnv, check_rows
from envs_adapters.rows import Rows
from rollout_engine.base.errors import ConfigError, refused

TRAITS: dict[str, Any] = {"is_single_turn": True, "placement": "processes"}

_SECONDS = 5
_MARKS = ("$", "\\boxed", "\\[", "\\(")
"""Marks of mathematics in a text."""


def make(
    name: str = "", *, rows: Rows | None = None, prompt_column: str = "prompt", answer_column: str = "answer"
) -> DatasetEnv:
    """One episode.

    Args:
        rows: instead of a path in the name.
        prompt_column: of the prompt, a text or a list of messages.
        answer_column: of the right answer: LaTeX or a number alone; or a solution that has it in $...$ or \\boxed{...},
            or after "####" as GSM8K's.
    """

    def reward(completions: Sequence[Any], **columns: Any) -> list[float]:
        return score(completions, columns[answer_column])

    return DatasetEnv(rows if rows is not None else name, reward, None, prompt_column)


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless there are rows, and the first one's answer can be read."""
    columns = [options.get("prompt_column", "prompt"), options.get("answer_column", "answer")]
    for option, column in zip(("prompt_column", "answer_column"), columns, strict=True):
        if not isinstance(column, str):
            raise ConfigError(refused(option, column, "the name of a column"))
    first = check_rows(name, options.get("rows"), columns)
    try:
        _read_right_answer(first[columns[1]])
    except ValueError as problem:
        raise ConfigError(f"math_verify: rows[0]: {problem}") from problem


def score(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    """A reward function: 1.0 for each completion whose last expression equals the right answer, else 0.0.

    Raises ValueError for a right answer that cannot be read. Comparisons have no time limit of their own outside of a
    process's main thread.
    """
    from math_verify import parse, verify

    seconds = _seconds()
    said = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [
        float(verify(_read_right_answer(right), parse(text, parsing_timeout=seconds), timeout_seconds=seconds))
        for text, right in zip(said, answer, strict=True)
    ]


def _read_right_answer(answer: Any) -> list[Any]:
    from math_verify import parse

    _, _, text = str(answer).rpartition("####")
    found: list[Any] = parse(text if any(mark in text for mark in _MARKS) else f"${text}$", parsing_timeout=_seconds())
    if not found:
        raise ValueError(f"the right answer {answer!r:.80} cannot be read as mathematics")
    return found


def _seconds() -> int | None:
    """The limit works by an alarm, which only a main thread can set."""
    return _SECONDS if threading.current_thread() is threading.main_thread() else None
