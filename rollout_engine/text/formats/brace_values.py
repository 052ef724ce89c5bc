"""Reads values as Gemma's templates write them: `{a:1,b:<escape>x, y<escape>,c:[true,{d:null}]}`.

Keys and constants have no quotes. A text stands between two tags of its own, so that it may contain anything else.
"""

import re
from typing import Any

from rollout_engine.text.formats.json_calls import Unreadable, after_space
from rollout_engine.text.formats.tool_arguments import parse_json
from rollout_engine.text.formats.transcript import MARK

_MAX_NESTING = 64
_BARE = re.compile(r"[^,{}\[\]]*")
_KEY = re.compile(r"[^:,{}\[\]]+")
_CONSTANTS = {"True": True, "False": False, "None": None}


class BraceReader:
    """Reads values whose texts stand between two `quote` tags."""

    def __init__(self, quote: str) -> None:
        self._quote = quote

    def read_object(self, text: str, at: int, depth: int = 0) -> tuple[dict[str, Any], int]:
        """The object that begins at `at`, and its end. Raises `Unreadable`."""
        if depth == _MAX_NESTING:
            raise Unreadable(f"nested deeper than {_MAX_NESTING} levels")
        found: dict[str, Any] = {}
        at = after_space(text, at + 1)
        while not text.startswith("}", at):
            key, at = self._read_key(text, at)
            at = after_space(text, at)
            if not text.startswith(":", at):
                raise Unreadable("its arguments are not {key:value,...}")
            found[key], at = self._read(text, after_space(text, at + 1), depth + 1)
            at = self._next(text, at, "}")
        return found, at + 1

    def _read(self, text: str, at: int, depth: int) -> tuple[Any, int]:
        if text.startswith(self._quote, at):
            return self._read_quoted(text, at)
        if text.startswith("{", at):
            return self.read_object(text, at, depth)
        if text.startswith("[", at):
            return self._read_list(text, at, depth)
        match = _BARE.match(text, at)
        assert match is not None, "it matches nothing, too"
        written = match[0].strip()
        if not written:
            raise Unreadable("an argument has no value")
        return _constant(written), match.end()

    def _read_list(self, text: str, at: int, depth: int) -> tuple[list[Any], int]:
        if depth == _MAX_NESTING:
            raise Unreadable(f"nested deeper than {_MAX_NESTING} levels")
        found: list[Any] = []
        at = after_space(text, at + 1)
        while not text.startswith("]", at):
            value, at = self._read(text, at, depth + 1)
            found.append(value)
            at = self._next(text, at, "]")
        return found, at + 1

    def _read_quoted(self, text: str, at: int) -> tuple[str, int]:
        start = at + len(self._quote)
        end = text.find(self._quote, start)
        if end < 0:
            raise Unreadable("a text in its arguments is not closed")
        return text[start:end].replace(MARK, ""), end + len(self._quote)

    def _read_key(self, text: str, at: int) -> tuple[str, int]:
        if text.startswith(self._quote, at):
            return self._read_quoted(text, at)
        match = _KEY.match(text, at)
        if match is None:
            raise Unreadable("its arguments are not {key:value,...}")
        return match[0].replace(MARK, "").strip(), match.end()

    def _next(self, text: str, at: int, closing: str) -> int:
        """The place of the next value, or of the closing bracket."""
        at = after_space(text, at)
        if text.startswith(",", at):
            return after_space(text, at + 1)
        if not text.startswith(closing, at):
            raise Unreadable(f"its arguments are not closed by {closing}")
        return at


def _constant(written: str) -> Any:
    written = written.replace(MARK, "")
    if written in _CONSTANTS:
        return _CONSTANTS[written]
    try:
        return parse_json(written)
    except (ValueError, RecursionError):
        return written
