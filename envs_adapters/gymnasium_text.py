"""Texts of gymnasium's environments: how observations are written, and how actions are read."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout_engine.base.errors import ConfigError, refused

_MAX_LISTED = 32
"""Actions that are listed one by one."""
_MAX_DIGITS = 18
"""Digits of a number that are read: more are no action in any case."""
_STYLE = re.compile(r"\x1b\[([\d;]*)m")
_BOLD, _COLOURS, _BACKGROUNDS = {1}, {*range(30, 39), *range(90, 98)}, {*range(40, 49), *range(100, 108)}
_MARKS = ((_BACKGROUNDS, "[]"), (_BOLD, "**"), (_COLOURS, "<>"))


def text_of(observation: Any) -> str:
    """An observation as text: a text as it is, arrays and tuples of numbers as lists with four digits a number."""
    return observation if isinstance(observation, str) else str(_plain(observation))


def mark_colours(printed: str) -> str:
    """Printed text with marks for its colour codes: [x] background, <x> colour, *x* bold."""
    parts, marks = list[str](), list[str]()
    for index, part in enumerate(_STYLE.split(printed)):
        if index % 2:
            codes = [int(code) for code in part.split(";") if code] or [0]
            marks = [] if 0 in codes else [*marks, *_marks_of(codes)]
        elif part:
            parts.append("".join(mark[0] for mark in marks) + part + "".join(mark[1] for mark in reversed(marks)))
    return "".join(parts).strip("\n")


class ActionReader:
    """Reads the actions of a `Discrete` space: numbers from `start`, or names if there are some.

    The action must end the answer, as a word of its own; characters around words, and upper case, do not count.
    """

    def __init__(self, start: int, count: int, names: Sequence[str] | None) -> None:
        """Raises `ConfigError` for names that do not fit."""
        _check_names(names, count)
        self._start, self._count, self._names = start, count, list(names or ())
        self._numbers = {name.strip().casefold(): start + index for index, name in enumerate(self._names)}
        choices = [*sorted(map(re.escape, self._numbers), key=len, reverse=True), r"-?\d+"]
        self._end = re.compile(rf"(?<![\w.+-])({'|'.join(choices)})\W*$")

    @property
    def request(self) -> str:
        """The text that asks the policy for an answer."""
        last = self._start + self._count - 1
        if self._names:
            listed = self._names
        elif self._count > _MAX_LISTED:
            return f"Answer with the number of an action, from {self._start} to {last}."
        else:
            listed = [str(number) for number in range(self._start, last + 1)]
        choice = listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} or {listed[-1]}"
        return f"Answer with an action: {choice}."

    def read(self, text: str) -> int | None:
        """The action; None if the text ends with none."""
        found = self._end.search(text.strip().casefold())
        if found is None:
            return None
        word = found.group(1)
        if word in self._numbers:
            return self._numbers[word]
        number = int(word[:_MAX_DIGITS])
        return number if self._start <= number < self._start + self._count else None


def _check_names(names: Any, count: int) -> None:
    if names is None:
        return
    bound = f"a list of {count} different names that are no numbers, one for each action, in their order"
    is_list = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if not is_list or any(not name.strip() or name.strip().lstrip("-").isdecimal() for name in names):
        raise ConfigError(refused("actions", names, bound))
    if len(names) != count or len({name.strip().casefold() for name in names}) != count:
        raise ConfigError(refused("actions", names, bound))


def _marks_of(codes: list[int]) -> list[str]:
    """The first kind of mark that a code asks for; numbers after 38 and 48 are shades of that colour."""
    shade = next((index for index, code in enumerate(codes) if code in (38, 48)), len(codes))
    return [mark for numbers, mark in _MARKS if numbers & set(codes[: shade + 1])][:1]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, list):
        return list(map(_plain, value))
    return float(f"{value:.4g}") if isinstance(value, float) else value
