"""The file of a training's steps, `steps.jsonl` next to its rollouts: written, read, and followed while it grows.

key       value
schema    1: the number of this table
step      number of the step; those of a file ascend
time      seconds since 1970, when the step was logged
numbers   {name: number}: the statistics of `rollout_engine.looking.statistics`, and numbers of the trainer's own.
          null: not finite
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rollout_engine.base.errors import RequestError
from rollout_engine.batches.rollout_files import append_text, complete_lines, end_last_line

logger = logging.getLogger("rollout_engine")

SCHEMA = 1
NAME = "steps.jsonl"


class LoggedStep(NamedTuple):
    """A line of the file."""

    step: int
    time: float
    numbers: dict[str, float | None]
    """None: a number that was not finite."""


class StepsFile:
    """Appends steps to a file. A line that was cut off at its end, as by a killed process, spoils itself alone."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """The file and its folder are made if they are missing. Raises `RequestError` if that cannot be."""
        self._path = Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a+b") as file:
                end_last_line(file)
                file.seek(0)
                steps = [step.step for line in file if (step := read_step(line)) is not None]
        except OSError as problem:
            raise RequestError.for_field("steps", str(path), "a file that can be written", f"{problem}.") from problem
        self.next_step = max(steps, default=-1) + 1
        """Number of the step to write next: one more than the last of the file."""
        self._has_failed = False

    def append(self, step: LoggedStep) -> None:
        """Write a step. One that cannot be written is missing, and the first of these is logged: training continues."""
        numbers = {name: value if _is_finite(value) else None for name, value in step.numbers.items()}
        line = json.dumps({"schema": SCHEMA, "step": step.step, "time": step.time, "numbers": numbers})
        try:
            append_text(self._path, line + "\n", after_cut=self._has_failed)
        except OSError as problem:
            if not self._has_failed:
                more = "Further steps that are missing are not reported"
                logger.warning("%s: step %d is missing (%s). %s.", self._path, step.step, problem, more)
            self._has_failed = True
        self.next_step = step.step + 1


def read_steps(path: str | os.PathLike[str]) -> list[LoggedStep]:
    """The steps of a file, in its order. A line that was cut off or is no step is left out. Raises `RequestError`."""
    try:
        lines = complete_lines(Path(path).read_bytes())[0]
    except OSError as problem:
        raise RequestError.for_field("path", str(path), "a file of steps", f"{problem}.") from problem
    return [step for line in lines if (step := read_step(line)) is not None]


def read_step(line: bytes) -> LoggedStep | None:
    """A line as a step; None for other lines, and for a step of a newer schema."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        return None
    step, time, numbers = found.get("step"), _number(found.get("time")), found.get("numbers")
    if type(step) is not int or time is None or not isinstance(numbers, Mapping):
        return None
    return LoggedStep(step, time, {name: _number(value) for name, value in numbers.items()})


def _number(value: Any) -> float | None:
    return float(value) if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)


def _is_finite(value: float | None) -> bool:
    try:
        return value is not None and math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False
