"""Files of settings (TOML): reading, `table.key=value` beside them, and the line that a key stands in."""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from rollout_engine.errors import ConfigError

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]")


def read_toml(path: Path, example: str) -> dict[str, Any]:
    """The content of a file. Raises `ConfigError`, pointing to `example`, unless it can be read and is TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(f"{path} cannot be read: {problem.strerror}. Give a TOML file, as {example}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path} is not TOML: {problem}. See {example}.") from None


def value_of(text: str) -> Any:
    """A value given on the command line: JSON, or else text."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return text


def set_key(content: dict[str, Any], key: str, value: Any) -> None:
    """Set "table.key", with the tables that it needs. Raises `ConfigError` where one of them is something else."""
    *tables, name = key.split(".")
    for table in tables:
        content = content.setdefault(table, {})
        if not isinstance(content, dict):
            raise ConfigError(f"'{key}' is not an option: {table} is not a table.")
    content[name] = value


def line_of(text: str, table: str, key: str, index: int = 0) -> int | None:
    """Number of the line, from 1 on, in which `key` of a table ("" for the top) stands; None where it is not found.

    `index`: which of the tables of this name, where there are several ([[table]]).
    """
    where, count = "", -1
    assigned = re.compile(rf"""\s*["']?{re.escape(key)}["']?\s*[.=]""")
    full = f"{table}.{key}" if table else key
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.match(line)
        if header:
            where = re.sub(r"""["'\s]""", "", header[2])
            count += header[1] == "[[" and where == table
            if where == full or where.startswith(f"{full}."):
                return number
        elif where == table and assigned.match(line) and (count == index or count < 0):
            return number
    return None
