"""Options of an engine in a TOML file: read, and the line of what is wrong with one."""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rollout_engine.errors import ConfigError, refused

_MOST_BYTES = 1 << 20


class ConfigFile(NamedTuple):
    """The keys of a file, and its text."""

    path: str
    options: dict[str, Any]
    """Names of options -> values; the values of a table such as [speculation] are a dict."""
    text: str

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "ConfigFile":
        """Read a file. Raises `ConfigError` where there is none, or it is not TOML (with the line)."""
        name = os.fspath(path)
        try:
            with open(name, "rb") as file:
                content = file.read(_MOST_BYTES + 1)
        except (OSError, ValueError) as problem:  # a name with a zero byte is a ValueError
            bound = "a TOML file with options of EngineConfig"
            raise ConfigError(refused("path", name, bound, f"{problem}.")) from None
        if len(content) > _MOST_BYTES:
            raise ConfigError(refused("path", name, f"a TOML file of at most {_MOST_BYTES} bytes"))
        try:
            text = content.decode()
            return cls(name, tomllib.loads(text), text)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise ConfigError(f"{name} is not TOML: {problem}. Write an option a line: max_num_seqs = 64.") from None

    def located(self, problem: ConfigError, elsewhere: Mapping[str, Any]) -> ConfigError:
        """The same error with the file, and the line of the key that it names.

        `elsewhere`: options that did not come from the file; their errors stay as they are.
        """
        text = str(problem)
        found = sorted(
            (isinstance(value, dict), place.start(), key)
            for key, value in _keys(self.options)
            if (place := re.search(rf"(?<![\w-]){re.escape(key[-1])}(?![\w-])", text))
        )
        key = found[0][2] if found else ("",)
        if key[0] in elsewhere or (not found and any(f"{name}=" in text for name in elsewhere)):
            return problem
        return self._with(self._line(key) if found else "", text)

    def _with(self, line: str, text: str) -> ConfigError:
        return ConfigError(f"{self.path}{line}: {text}")

    def _line(self, key: tuple[str, ...]) -> str:
        """Where in the file the statement begins that sets `key`, as ":7"; empty where no line has its name."""
        lines = self.text.splitlines(keepends=True)
        named = [number for number, line in enumerate(lines) if key[-1] in line]
        for i, number in enumerate(named):
            for end in (*named[i + 1 :], len(lines)):
                try:
                    known = tomllib.loads("".join(lines[:end]))
                except tomllib.TOMLDecodeError:  # in the middle of a value of several lines
                    continue
                if _has(known, key):
                    return f":{number + 1}"
                break
        return ""


def _keys(table: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in table.items():
        yield (*above, name), value
        if isinstance(value, dict):
            yield from _keys(value, (*above, name))


def _has(table: Any, key: tuple[str, ...]) -> bool:
    for name in key:
        if not isinstance(table, dict) or name not in table:
            return False
        table = table[name]
    return True
