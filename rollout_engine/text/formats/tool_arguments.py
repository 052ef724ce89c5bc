"""Reads the arguments of tool calls: strict JSON, and texts whose types a JSON schema gives.

Some chat templates write `5` for the number and for the text alike. The tool's schema decides then: a text becomes the
JSON value that it spells if the schema allows that value, and stays a text otherwise.
"""

import ast
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from rollout_engine.base.structured_outputs import is_plain

_MAX_NESTING = 64
"""Objects and arrays of a value inside one another."""
_MAX_DEPTH = 16
"""References and combinations followed in one schema."""
_MAX_STEPS = 10_000
"""Schemas looked at for the arguments of one call: combinations of references multiply."""
_CONSTRAINTS = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")
_COMBINATIONS: dict[str, Callable[[Iterator[bool]], bool]] = {"anyOf": any, "oneOf": any, "allOf": all}
_SPELLED = {"true": True, "false": False, "null": None, "none": None}
"""Constants in JSON's spelling and in Python's, which templates write by `| string`."""
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises `ValueError` or `RecursionError` for a text that is none.

    Numbers are finite, at most 64 objects and arrays are inside one another, and each half of a surrogate pair, which
    no encoding takes, becomes U+FFFD.
    """
    return _plain(_decoder.decode(text))


def raw_json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at `at`, and its end; as `parse_json` otherwise."""
    value, end = _decoder.raw_decode(text, at)
    return _plain(value), end


def typed_arguments(arguments: Mapping[str, Any], schema: Any) -> dict[str, Any]:
    """The texts of `arguments` as values of the types that a tool's JSON schema gives to its parameters.

    All stay texts under a schema that combines and refers too much to be followed: clients bring schemas.
    """
    root = _Root(schema)
    try:
        return {
            name: _convert_text(value, _property(schema, name, root), root) if isinstance(value, str) else value
            for name, value in arguments.items()
        }
    except _TooManySteps:
        return dict(arguments)


class _TooManySteps(Exception):
    """Raised by `_Root.step`."""


class _Root:
    """The whole schema, and the steps that following it may still take."""

    def __init__(self, schema: Any) -> None:
        self.schema, self._left = schema, _MAX_STEPS

    def step(self) -> None:
        """Count one step. Raises `_TooManySteps`."""
        self._left -= 1
        if self._left < 0:
            raise _TooManySteps


def _convert_text(text: str, schema: Any, root: _Root) -> Any:
    if not isinstance(schema, Mapping) or not any(name in schema for name in _CONSTRAINTS):
        return text
    return next((each for each in _readings(text) if _allows(schema, each, root)), text)


def _readings(text: str) -> Iterator[Any]:
    """The values that a text may spell, the text itself after those that are spelled like it."""
    spelled = text.strip()
    if spelled.lower() in _SPELLED:
        yield _SPELLED[spelled.lower()]
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        yield from _python_literals(spelled)
        yield text
        return
    is_quoted = isinstance(value, str)  # templates write texts without quotes
    yield from (text, value) if is_quoted else (value, text)
    if isinstance(value, float) and value.is_integer():
        yield int(value)


def _python_literals(text: str) -> Iterator[Any]:
    """A list or dict in Python's spelling, as Seed's template writes them."""
    if text.startswith(("[", "{")):
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = ast.literal_eval(text)
            if is_plain(value, _MAX_NESTING):
                yield _plain(value)


def _allows(schema: Any, value: Any, root: _Root, depth: int = 0) -> bool:
    """Whether a schema allows a value, as far as its type, its constants and combinations of those decide."""
    root.step()
    if not isinstance(schema, Mapping) or depth == _MAX_DEPTH:
        return schema is not False
    if value is None and schema.get("nullable") is True:
        return True
    if "const" in schema and not _is_same(schema["const"], value):
        return False
    if isinstance(schema.get("enum"), list) and not any(_is_same(each, value) for each in schema["enum"]):
        return False
    kinds = schema.get("type")
    if kinds is not None and not any(_is_of(value, kind) for kind in (kinds if isinstance(kinds, list) else [kinds])):
        return False
    if "$ref" in schema and not _allows(_resolve_reference(schema["$ref"], root), value, root, depth + 1):
        return False
    return all(
        combine(_allows(each, value, root, depth + 1) for each in schema[name])
        for name, combine in _COMBINATIONS.items()
        if isinstance(schema.get(name), list)
    )


def _is_of(value: Any, kind: Any) -> bool:
    if not isinstance(kind, str) or kind not in _TYPES:
        return True
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _is_same(constant: Any, value: Any) -> bool:
    return bool(constant == value) and isinstance(constant, bool) == isinstance(value, bool)


def _property(schema: Any, name: str, root: _Root, depth: int = 0) -> Any:
    """The schema of one parameter; None if there is none."""
    root.step()
    if not isinstance(schema, Mapping) or depth == _MAX_DEPTH:
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    parts = [each for key in _COMBINATIONS if isinstance(schema.get(key), list) for each in schema[key]]
    parts += [_resolve_reference(schema["$ref"], root)] if "$ref" in schema else []
    found = (_property(part, name, root, depth + 1) for part in parts)
    return next((each for each in found if each is not None), schema.get("additionalProperties"))


def _resolve_reference(reference: Any, root: _Root) -> Any:
    """The part of a schema that "#/$defs/Name" names; {}, which allows everything, if it is not there."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return {}
    found = root.schema
    for key in reference.removeprefix("#").split("/")[1:]:
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return {} if found is None else found


def _plain(value: Any, depth: int = 0) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if not isinstance(value, dict | list):
        return value
    if depth == _MAX_NESTING:
        raise ValueError(f"nested deeper than {_MAX_NESTING} levels")
    if isinstance(value, dict):
        return {_plain(key, depth): _plain(item, depth + 1) for key, item in value.items()}
    return [_plain(item, depth + 1) for item in value]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is beyond the range of numbers")
    return number


_decoder = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
