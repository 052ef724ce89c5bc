"""Texts that clients give as versions of weights: any text is taken, and stands for a number of the engine's.

A number, or a text that ends with one ("weight_v000042"), is that number. Any other text stands for the version after
the live one when it is first named, so that all calls of one update mean the same version.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.serve.pending_update import as_version

Named: TypeAlias = list[tuple[int, str]]
_OF_UPDATES, _OF_LIVE = ("weight_version", "target_version"), "new_version"
"""Fields of bodies with the version of an update, and with that of the live weights."""
_MAX_CHARS, _MAX_KEPT = 256, 4096


class VersionNames:
    """The texts of one server's versions. `live` gives the version of the live weights."""

    def __init__(self, live: Callable[[], int]) -> None:
        self._live = live
        self._numbers: dict[str, int] = {}
        self._texts: dict[int, str] = {}

    def read(self, body: Any) -> Named:
        """Put numbers in place of the texts that the version fields of a body have. Raises `RequestError`.

        Returns the number and text of each: `confirm` those of an update once it has been carried out.
        """
        named = []
        for field in _fields_of(body.__class__):
            text = getattr(body, field)
            if self._is_name(field, text):
                named.append((self._live() if field == _OF_LIVE else self._number_of(text), text))
                setattr(body, field, named[-1][0])
                if field == _OF_LIVE:
                    self.confirm(named)
        return named

    def confirm(self, named: Named) -> None:
        """Note the text of the live version, if that is one of these: an update that failed names no version."""
        for number, text in named:
            if number == self._live():
                self._texts[number] = text

    def text_of(self, version: int) -> str:
        """The text that a client gave a version; its number without one."""
        return self._texts.get(version, str(version))

    def _is_name(self, field: str, given: Any) -> bool:
        """Whether a version is a text without a number. Raises `RequestError` for one that is too long."""
        if not isinstance(given, str) or given in ("", "default"):
            return False
        try:
            as_version(given)
        except RequestError:
            if len(given) > _MAX_CHARS or not given.isprintable():
                bound = f"a whole number, or a printable text of at most {_MAX_CHARS} characters"
                raise RequestError.for_field(field, given, bound) from None
            return True
        return False

    def _number_of(self, text: str) -> int:
        number, live = self._numbers.get(text, 0), self._live()
        if number <= live and self._texts.get(number) != text:
            number = live + 1
        self._numbers[text] = number
        if len(self._numbers) > _MAX_KEPT:
            self._texts.pop(self._numbers.pop(next(iter(self._numbers))), None)
        return number


@cache
def _fields_of(kind: Any) -> tuple[str, ...]:
    """The version fields of a kind of bodies."""
    known = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else ()
    return tuple(field for field in known if field in (*_OF_UPDATES, _OF_LIVE))
