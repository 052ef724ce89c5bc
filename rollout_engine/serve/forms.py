"""Structured outputs in bodies of requests, under the names of OpenAI's, vLLM's and SGLang's clients.

JSON is compact unless a schema's own "x-guidance" asks for something else: with free white space a small model may fill
an answer with spaces.
"""

import json
from collections.abc import Mapping
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.base.structured_outputs import MAX_GRAMMAR_CHARS

FORM_NAMES = (
    *("structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "ebnf", "structural_tag"),
)
"""Fields of bodies that set an output's form."""
_KINDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
_OPTIONS_OFF = (None, False)
_COMPACT = {"whitespace_flexible": False}


def form_of(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """`SamplingParams.structured_outputs` of a body's fields by name; None if they ask for no form.

    Raises `RequestError` for several at once, and for a form that is none.
    """
    asked = {name: value for name, value in given.items() if value is not None}
    found = {name: _compact(form) for name, value in asked.items() if (form := _read(name, value)) is not None}
    if len(found) > 1:
        raise RequestError.for_field(" and ".join(found), sorted(found), "one of them alone")
    return next(iter(found.values()), None)


def _read(name: str, value: Any) -> dict[str, Any] | None:
    if value == "" and name != "guided_choice":
        return None
    if name in _KINDS:
        return {_KINDS[name]: value}
    if name == "structural_tag":
        return {"structural_tag": _from_json(name, value)}
    if not isinstance(value, dict):
        raise RequestError.for_field(name, value, "a JSON object")
    return _response_format(value) if name == "response_format" else _structured_outputs(value)


def _response_format(value: dict[str, Any]) -> dict[str, Any] | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json": {"type": "object"}}
    if kind == "structural_tag":
        return {"structural_tag": value}
    named = value.get("json_schema")
    if kind != "json_schema" or not isinstance(named, dict) or "schema" not in named:
        bound = (
            '{"type": "json_schema", "json_schema": {"schema": ...}}, or type "text", "json_object", "structural_tag"'
        )
        raise RequestError.for_field("response_format", value, bound)
    return {"json": named["schema"]}


def _structured_outputs(value: dict[str, Any]) -> dict[str, Any] | None:
    """Our own, and vLLM's, which may hold options that are off."""
    kept = {name: form for name, form in value.items() if form not in _OPTIONS_OFF}
    if kept.get("disable_any_whitespace") is True:  # JSON is compact here in any case
        del kept["disable_any_whitespace"]
    if kept == {"json_object": True}:
        return {"json": {"type": "object"}}
    if isinstance(kept.get("structural_tag"), str):
        kept["structural_tag"] = _from_json("structured_outputs['structural_tag']", kept["structural_tag"])
    return kept or None


def _compact(form: dict[str, Any]) -> dict[str, Any]:
    """The form with compact JSON. Values that are none of theirs are left to the checks of `SamplingParams`."""
    tags = form.get("structural_tag")
    if "json" in form:
        return form | {"json": _compact_schema(form["json"])}
    if not isinstance(tags, dict) or not isinstance(tags.get("structures"), list):
        return form
    structures = [
        each | {"schema": _compact_schema(each["schema"])} if isinstance(each, dict) and "schema" in each else each
        for each in tags["structures"]
    ]
    return form | {"structural_tag": tags | {"structures": structures}}


def _compact_schema(schema: Any) -> Any:
    if isinstance(schema, str) and len(schema) <= MAX_GRAMMAR_CHARS:
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            return schema
    if schema is True:
        schema = {}
    return {"x-guidance": _COMPACT, **schema} if isinstance(schema, dict) else schema


def _from_json(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as problem:
        raise RequestError.for_field(name, value, f"a structural tag as JSON ({problem})") from None
