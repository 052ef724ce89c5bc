"""Rows of data that episodes are played with: columns, a list of dicts, a JSONL file, or a Hugging Face data set."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from envs_adapters.base import load
from rollout_engine.base.errors import ConfigError, refused

Row: TypeAlias = Mapping[str, Any]


@runtime_checkable
class RowTable(Protocol):
    """The interface of a `datasets.Dataset`; a list of dicts has all of it except the names."""

    column_names: list[str]

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


Rows: TypeAlias = Sequence[Row] | Mapping[str, Sequence[Any]] | RowTable | str | Path
"""Dicts; {column: values}; a `datasets.Dataset`; or a path: of a JSONL file with one JSON object a line, or of a
directory that `Dataset.save_to_disk` wrote."""

_KINDS = "a list of at least one dict, a dict of columns, a datasets.Dataset, or the path of a JSONL file"


def read_rows(rows: Rows, fields: Sequence[str] = ()) -> "Sequence[Row] | RowTable":
    """The rows, read from their file if `rows` is a path. A file is read again only when it has changed.

    Raises `ConfigError` unless there is a row, and each has all of `fields`.
    """
    if isinstance(rows, str | Path):
        path = Path(rows)
        try:
            changed = (path / "state.json" if (path / "state.json").exists() else path).stat().st_mtime_ns
        except OSError as problem:
            raise ConfigError(refused("rows", str(rows), _KINDS, f"{problem}.")) from None
        if not path.is_dir():
            return _read_file(str(path), changed, tuple(fields))
        rows = _read_saved(str(path), changed)
    if isinstance(rows, Mapping):
        return _from_columns(rows, fields)
    if isinstance(rows, RowTable):
        if not len(rows):
            raise ConfigError("rows: the data set is empty.")
        _check("rows", dict.fromkeys(rows.column_names), fields)
        return rows
    if not isinstance(rows, list | tuple) or not rows:
        raise ConfigError(refused("rows", rows, _KINDS))
    for number, row in enumerate(rows):
        _check(f"rows[{number}]", row, fields)
    return rows


def index_of(rows: Rows, seed: int) -> int:
    """The number of the row that the episode with this seed has: `seed % len(rows)`.

    Successive seeds, which a rollout gives its starts, visit each row before any twice.
    """
    if isinstance(rows, Mapping):
        return seed % len(next(iter(rows.values())))
    return seed % len(read_rows(rows) if isinstance(rows, str | Path) else rows)


def row_of(rows: Rows, seed: int) -> Row:
    """The row of the episode with this seed."""
    index = index_of(rows, seed)
    if isinstance(rows, Mapping):
        return {name: values[index] for name, values in rows.items()}
    found: Row = (read_rows(rows) if isinstance(rows, str | Path) else rows)[index]
    return found


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


@lru_cache(maxsize=16)
def _read_saved(path: str, changed: int) -> Any:
    if find_spec("datasets") is None:
        advice = "pip install 'rollout-engine[datasets]' installs it"
        raise ConfigError(f"{path} is a directory, which the package 'datasets' reads: {advice}.")
    import datasets

    try:
        found = datasets.load_from_disk(path)
    except (OSError, ValueError) as problem:
        raise ConfigError(refused("rows", path, "what Dataset.save_to_disk wrote", f"{problem}")) from problem
    if isinstance(found, datasets.DatasetDict):
        splits = ", ".join(str(Path(path, split)) for split in found)
        raise ConfigError(f"{path} holds several splits. Name one of them: {splits}.")
    return found


def _from_columns(columns: Mapping[str, Any], fields: Sequence[str]) -> list[Row]:
    for name, values in columns.items():
        if isinstance(values, str) or not hasattr(values, "__len__") or not hasattr(values, "__getitem__"):
            raise ConfigError(refused(f"rows[{name!r}]", values, "a list of values, one a row"))
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) != 1 or not min(lengths.values()):
        raise ConfigError(f"rows: columns must have the same number of values, at least one; they have {lengths}.")
    _check("rows", columns, fields)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _check(where: str, row: Any, fields: Sequence[str]) -> None:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: expected a dict, got {type(row).__name__}.")
    missing = [field for field in fields if field not in row]
    if missing:
        raise ConfigError(f"{where}: the field '{missing[0]}' is missing; there are {', '.join(map(repr, row))}.")
