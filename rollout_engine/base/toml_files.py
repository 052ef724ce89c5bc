"""Files of settings (TOML): reading, `table.key=value` in addition to them, and the line of an error in one."""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from rollout_engine.base.errors import ConfigError
from sync.own_files import read_regular

_MOST_BYTES = 1 << 20
Key = tuple[str | int, ...]
"""Names of tables, and numbers in arrays of them, from the top of a file down."""


class TomlFile(NamedTuple):
    """The content of a file, and its text."""

    path: str
    content: dict[str, Any]
    text: str

    @classmethod
    def read(cls, path: str | os.PathLike[str], example: str) -> "TomlFile":
        """Read a file. Raises `ConfigError`, pointing to `example`, unless it can be read and is TOML."""
        name = os.fspath(path)
        try:
            found = read_regular(name, _MOST_BYTES)
        except (OSError, ValueError) as problem:  # a name with a zero byte is a ValueError
            why = getattr(problem, "strerror", None) or problem
            raise ConfigError(f"{name} cannot be read: {why}. Give a TOML file, as {example}.") from None
        try:
            text = found.decode()
            return cls(name, tomllib.loads(text), text)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise ConfigError(f"{name} is not TOML: {problem}. Expected keys and values, as {example}.") from None

    def place(self, key: Key) -> str:
        """The file, and the first line of the statement that sets `key`, as "a.toml:7", if a line has its name."""
        lines = self.text.splitlines(keepends=True)
        named = [number for number, line in enumerate(lines) if str(key[-1]) in line]
        for i, number in enumerate(named):
            for end in (*named[i + 1 :], len(lines)):
                try:
                    known = tomllib.loads("".join(lines[:end]))
                except tomllib.TOMLDecodeError:  # in the middle of a value of several lines
                    continue
                if _has(known, key):
                    return f"{self.path}:{number + 1}"
                break
        return self.path

    def add_location(self, problem: ConfigError, elsewhere: Mapping[str, Any]) -> ConfigError:
        """The same error with the file, and the line of the key that it names.

        `elsewhere`: options that were not read from the file; their errors stay as they are.
        """
        text = str(problem)
        found = sorted(
            (isinstance(value, dict), place.start(), key)
            for key, value in _keys(self.content)
            if (place := re.search(rf"(?<![\w-]){re.escape(key[-1])}(?![\w-])", text))
        )
        key = found[0][2] if found else ("",)
        if key[0] in elsewhere or (not found and any(f"{name}=" in text for name in elsewhere)):
            return problem
        return ConfigError(f"{self.place(key) if found else self.path}: {text}")


def value_of(text: str) -> Any:
    """A value given on the command line: JSON, or else text."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return text


def set_key(content: dict[str, Any], key: str, value: Any) -> None:
    """Set "table.key", with the tables that it needs. Raises `ConfigError` if one of them is something else."""
    *tables, name = key.split(".")
    for table in tables:
        content = content.setdefault(table, {})
        if not isinstance(content, dict):
            raise ConfigError(f"'{key}' is not an option: {table} is not a table.")
    content[name] = value


def _keys(table: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in table.items():
        yield (*above, name), value
        if isinstance(value, dict):
            yield from _keys(value, (*above, name))


def _has(found: Any, key: Key) -> bool:
    for name in key:
        is_there = name in found if isinstance(found, dict) else isinstance(found, list) and name in range(len(found))
        if not is_there:
            return False
        found = found[name]
    return True
