"""Reads msgspec's errors, which say only in prose which value does not fit a type, and why.

    Expected `int | null`, got `str` - at `$.n`                a wrong type
    Expected `int` >= 1 - at `$.sizes[2]`                      a broken bound
    Expected `int`, got `str` - at `key` in `$.biases`         in a key of a dict; in a value: at `$.biases[...]`
    Invalid enum value 'x' - at `$.mode`                       an unknown word
    Object missing required field `x` - at `$.inner`
    Object contains unknown field `x` - at `$.inner`

msgspec does not promise this wording. `tests/unit/base/test_msgspec_errors.py` fails for a version that has another.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple, Self

import msgspec

_EXPECTED = re.compile(r"Expected `([^`]*)`([^,]*?)(?:, got `([^`]*)`)?(?: - at |$)")
_PLACE = re.compile(r" - at (`key` in )?`\$\.?([^`]*)`$")
_FIELD = re.compile(r"Object (missing required|contains unknown) field `([^`]*)`")


class Misfit(NamedTuple):
    """A value that does not fit its type."""

    text: str
    """msgspec's own text."""
    path: str
    """Path of the value, such as "sizes[2]" or "inner.x"; "" for the whole."""
    in_key: bool
    """Whether a key of the dict at `path` does not fit."""
    missing: str
    """Name of the field that the object at `path` lacks; "" for none."""
    unknown: str
    """Name of the field that the object at `path` should not have; "" for none."""
    expected: list[str]
    """Names of the JSON types that fit; empty unless the type is wrong or a bound is broken."""
    bound: str
    """The broken bound, such as " >= 1"; "" if the type is wrong."""
    got: str
    """Name of the value's JSON type; "" unless the type is wrong."""

    @classmethod
    def of(cls, error: msgspec.ValidationError) -> Self:
        """Read the text of an error."""
        text = str(error)
        place, found, field = _PLACE.search(text), _EXPECTED.match(text), _FIELD.match(text)
        return cls(
            text,
            path=place[2] if place else "",
            in_key=bool(place and place[1]),
            missing=field[2] if field and field[1] == "missing required" else "",
            unknown=field[2] if field and field[1] == "contains unknown" else "",
            expected=found[1].split(" | ") if found else [],
            bound=found[2] if found else "",
            got=(found[3] or "") if found else "",
        )

    @property
    def is_unknown_word(self) -> bool:
        """Whether the value is none of the words that its type lists."""
        return self.text.startswith("Invalid enum value")

    def describe_types(self, words: Mapping[str, str]) -> str:
        """Name the types that fit, and the broken bound, by the `words` for msgspec's names of types."""
        return " or ".join(words.get(name, name) for name in self.expected) + self.bound
