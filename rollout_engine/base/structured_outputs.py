"""The forms that a request may ask its output to have, `SamplingParams.structured_outputs`, and the bounds of that.

{"json": schema} | {"regex": text} | {"grammar": Lark text} | {"choice": [text, ...]} | {"structural_tag": {...}}
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from rollout_engine.base.errors import RequestError, did_you_mean

KINDS = ("json", "regex", "grammar", "choice", "structural_tag")
MAX_GRAMMAR_CHARS = 1 << 16
"""Longest schema, pattern or grammar, as text."""
MAX_SCHEMA_DEPTH = 64
"""Dicts and lists of a schema inside one another."""
MAX_CHOICES = 1_024
MAX_TAGS = 128
_FIELD = "structured_outputs"
_TAG_OPTIONS = ("at_least_one", "stop_after_first")
"""Options of structural tags, off if they are absent."""


def check_structured_outputs(given: Mapping[str, Any] | None) -> None:
    """Raise `RequestError` for anything but a structured output within the size limits. Nothing is compiled."""
    if given is None:
        return
    if len(given) != 1 or next(iter(given)) not in KINDS:
        if {"type", "properties", "$ref", "anyOf"} & given.keys():
            hint = "Give a JSON schema as {'json': schema}."
        else:
            unknown = [str(name) for name in given if name not in KINDS]
            hint = "".join(did_you_mean(name, KINDS) or f"{name!r} is none of them." for name in unknown[:1])
        bound = f"a dict with exactly one of the keys {', '.join(map(repr, KINDS))}"
        raise RequestError.for_field(_FIELD, dict(given), bound, hint)
    kind, value = next(iter(given.items()))
    if kind == "choice":
        _check_choices(value)
    elif kind == "structural_tag":
        _check_tags(value)
    elif kind == "json":
        check_schema(f"{_FIELD}['json']", value)
    else:
        _check_text(f"{_FIELD}[{kind!r}]", value)
    _check_text(_FIELD, text_of(given))


def text_of(given: Mapping[str, Any]) -> str:
    """The structured output as JSON, properties in the given order: equal text means equal grammar."""
    return json.dumps(given, ensure_ascii=False)


def check_schema(field: str, schema: Any) -> None:
    """Raise `RequestError` unless `schema` is a JSON schema in size: a dict, a bool, or either as JSON text."""
    if isinstance(schema, str):
        _check_text(field, schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as problem:
            bound = f"a JSON schema as a dict or as JSON text ({problem})"
            raise RequestError.for_field(field, schema, bound) from None
    if not isinstance(schema, dict | bool):
        raise RequestError.for_field(field, schema, "a JSON schema: a dict or a bool")
    if not is_plain(schema, MAX_SCHEMA_DEPTH):
        bound = f"plain JSON, numbers finite, at most {MAX_SCHEMA_DEPTH} dicts and lists inside one another"
        raise RequestError.for_field(field, schema, bound)


def is_plain(value: object, depth: int) -> bool:
    """Whether a value is JSON of at most `depth` dicts and lists inside one another."""
    if isinstance(value, dict):
        return depth > 0 and all(isinstance(key, str) and is_plain(item, depth - 1) for key, item in value.items())
    if isinstance(value, list):
        return depth > 0 and all(is_plain(item, depth - 1) for item in value)
    if type(value) is int or type(value) is float:
        return -sys.float_info.max <= value <= sys.float_info.max  # NaN is in no bounds
    return value is None or type(value) in (bool, str)


def _check_choices(choices: Any) -> None:
    field = f"{_FIELD}['choice']"
    if not isinstance(choices, list) or not 1 <= len(choices) <= MAX_CHOICES:
        raise RequestError.for_field(field, choices, f"a list of 1 to {MAX_CHOICES} strings")
    for place, choice in enumerate(choices):
        _check_text(f"{field}[{place}]", choice)


def _check_tags(value: Any) -> None:
    field = f"{_FIELD}['structural_tag']"
    bound = '{"structures": [{"begin": text, "schema": JSON schema, "end": text}, ...], "triggers": [text, ...]}'
    names, kind = {"structures", "triggers"}, "structural_tag"
    if not isinstance(value, dict) or set(value) - {"type", *_TAG_OPTIONS} != names or value.get("type", kind) != kind:
        raise RequestError.for_field(field, value, bound)
    for name in _TAG_OPTIONS:
        if not isinstance(value.get(name, False), bool):
            raise RequestError.for_field(f"{field}[{name!r}]", value[name], "a bool")
    structures, triggers = value["structures"], value["triggers"]
    for name, given in (("structures", structures), ("triggers", triggers)):
        if not isinstance(given, list) or not 1 <= len(given) <= MAX_TAGS:
            raise RequestError.for_field(f"{field}['{name}']", given, f"a list of 1 to {MAX_TAGS}")
    for place, trigger in enumerate(triggers):
        _check_text(f"{field}['triggers'][{place}]", trigger)
    for place, tag in enumerate(structures):
        where = f"{field}['structures'][{place}]"
        if not isinstance(tag, dict) or set(tag) != {"begin", "schema", "end"} or not isinstance(tag["end"], str):
            raise RequestError.for_field(where, tag, '{"begin": text, "schema": JSON schema, "end": text}')
        _check_text(f"{where}['begin']", tag["begin"])
        check_schema(f"{where}['schema']", tag["schema"])
        if trigger_of(tag["begin"], triggers) is None:
            raise RequestError.for_field(f"{where}['begin']", tag["begin"], f"text that begins with one of {triggers}")


def trigger_of(begin: str, triggers: list[str]) -> str | None:
    """The longest trigger with which the beginning of a tag begins; None for none."""
    return max((trigger for trigger in triggers if begin.startswith(trigger)), key=len, default=None)


def _check_text(field: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError.for_field(field, text, "text of at least one character")
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError.for_field(field, f"{len(text)} characters", f"at most {MAX_GRAMMAR_CHARS} characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError.for_field(field, text, "Unicode text; this holds half a surrogate pair") from None
