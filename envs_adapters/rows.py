"""Rows of data that episodes are played with: a list of dicts, or a JSONL file of one JSON object a line."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from envs_adapters.base import load
from rollout_engine.errors import ConfigError, refused

Row: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = list[Row] | tuple[Row, ...] | str | Path


def read_rows(rows: Rows, fields: Sequence[str] = ()) -> list[Row] | tuple[Row, ...]:
    """The rows, read from their file where `rows` is a path. A file is read again only when it has changed.

    Raises `ConfigError` unless there is a row, and each is a dict that has all of `fields`.
    """
    if isinstance(rows, str | Path):
        try:
            changed = Path(rows).stat().st_mtime_ns
        except OSError as problem:
            raise ConfigError(refused("rows", str(rows), "a list of dicts or a JSONL file", f"{problem}.")) from None
        return _read_file(str(rows), changed, tuple(fields))
    if not isinstance(rows, list | tuple) or not rows:
        raise ConfigError(refused("rows", rows, "a list of at least one dict, or the path of a JSONL file"))
    for number, row in enumerate(rows):
        _check(f"rows[{number}]", row, fields)
    return rows


def row_of(rows: Rows, seed: int) -> Row:
    """The row of the episode with this seed: `rows[seed % len(rows)]`."""
    found = read_rows(rows) if isinstance(rows, str | Path) else rows
    return found[seed % len(found)]


def check_function(option: str, function: Callable[..., Any] | str) -> None:
    """Raise `ConfigError` unless `function` is one, or the "module:attribute" of one."""
    bound = 'a function, or "module:attribute" of one'
    try:
        found = load(function)
    except (ImportError, AttributeError, ValueError) as problem:
        raise ConfigError(refused(option, function, bound, f"{problem}.")) from problem
    if not callable(found):
        raise ConfigError(refused(option, function, bound))


@lru_cache(maxsize=16)
def _read_file(path: str, changed: int, fields: tuple[str, ...]) -> list[Row]:
    rows: list[Row] = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as problem:
                raise ConfigError(f"{path}, line {number}: no JSON object: {problem}.") from problem
            _check(f"{path}, line {number}", row, fields)
            rows.append(row)
    if not rows:
        raise ConfigError(f"{path} has no rows: expected one JSON object a line.")
    return rows


def _check(where: str, row: Any, fields: Sequence[str]) -> None:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: expected a dict, got {type(row).__name__}.")
    missing = [field for field in fields if field not in row]
    if missing:
        raise ConfigError(f"{where}: the field '{missing[0]}' is missing; there are {', '.join(map(repr, row))}.")
