"""Bodies and queries of requests, read as the structs of their routes."""

from collections.abc import Collection, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints
from urllib.parse import parse_qs

import msgspec

from rollout_engine.base.errors import refused, unknown_name
from rollout_engine.base.msgspec_errors import Misfit
from rollout_engine.base.structs import allowed_words
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Route

_Kind = TypeVar("_Kind", bound=msgspec.Struct)
_JSON_TYPES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
"""Names of JSON types in errors, by the names that msgspec gives them."""
_MOST_VALUES, _MOST_COMMAS = 1 << 18, 1 << 23
"""Arrays and objects of a body, and commas between values. A body is decoded at once, and nothing else runs meanwhile:
a microsecond and a hundred bytes for an array, a tenth of that for a number."""
_SCORED_PROMPTS = frozenset(("prompt_logprob_token_ids", "prompt_logprob_start", "prompt_logprobs"))
"""Sampling parameters that are given next to `sampling_params` by mistake."""
_EXAMPLES = {
    "max_tokens": '"max_tokens": 1024',
    "messages": '"messages": [{"role": "user", "content": "Hello"}]',
    "input": '"input": "Hello"',
    "reward": '"reward": 1.0',
}
"""Fields that a body may have to have -> how they are given."""


class OpenBytes:
    """Counts the bytes of bodies that are being received, of all connections together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = 0

    def add(self, num_bytes: int) -> None:
        """Count more of them. Raises `HttpProblem` 503, having counted, if they are too many."""
        self.count += num_bytes
        if self.count > self._most:
            message = f"Bodies of {self._most} bytes are being received from all clients: send the request again."
            raise HttpProblem(503, message, headers={"connection": "close"})


def read_body(route: Route, data: bytes, query: str) -> Any:
    """The request's fields: the JSON object of its body, over those of its query. An empty body is an empty object.

    A raw body is returned as it is.

    Fields that change nothing here are left out, as are fields that ask for nothing. Raises `HttpProblem` 400 for any
    other unknown field, for a wrong type, and for malformed JSON.
    """
    if route.is_raw:
        return data
    if route.body is None:
        return None
    _check_values(data)
    try:
        if not query:
            return _decoder(route.body).decode(data or b"{}")
        return _convert(route, {**_fields(query), **_object(data)}, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _convert(route, {**_fields(query), **_object(data)}, strict=not query)


def _check_values(data: bytes) -> None:
    """Raise `HttpProblem` 400 for a body with too many arrays and objects, before any is made."""
    if data.count(b"[") + data.count(b"{") <= _MOST_VALUES and data.count(b",") <= _MOST_COMMAS:
        return
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    parts = unescaped.split(b'"')[::2]  # not within texts
    count, num_commas = (
        sum(each.count(b"[") + each.count(b"{") for each in parts),
        sum(each.count(b",") for each in parts),
    )
    if count > _MOST_VALUES:
        raise HttpProblem(400, f"The body has {count} arrays and objects, and may have {_MOST_VALUES}: send less.")
    if num_commas > _MOST_COMMAS:
        raise HttpProblem(
            400, f"The body has {num_commas} commas between values, and may have {_MOST_COMMAS}: send less."
        )


@cache
def _decoder(kind: type[msgspec.Struct]) -> "msgspec.json.Decoder[Any]":
    return msgspec.json.Decoder(kind)


def _fields(query: str) -> dict[str, Any]:
    """The fields of a query; one that is given several times is a list."""
    found = parse_qs(query, keep_blank_values=True)
    return {name: values if len(values) > 1 else values[0] for name, values in found.items()}


def _object(data: bytes) -> dict[str, Any]:
    try:
        read = msgspec.json.decode(data or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise HttpProblem(400, f"The body is not JSON: {problem}") from None
    if not isinstance(read, dict):
        raise HttpProblem(400, f"The body must be a JSON object, not {type(read).__name__}.")
    return read


def read_fields(
    kind: type[_Kind],
    fields: Mapping[str, Any],
    where: str,
    *,
    ignored: Collection[str] = (),
    neutral: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
    strict: bool = True,
) -> _Kind:
    """Fields of an object as a struct. `where`: the object's name in errors.

    `ignored` ones are left out, as are those that ask for nothing: None, or one of their values in `neutral`.
    `strict=False` reads numbers in texts. Raises `HttpProblem` 400 for any other unknown field and for a wrong type.
    """
    known = kind.__struct_fields__
    kept = {}
    for name, value in fields.items():
        if name in known:
            kept[name] = value
        elif not (name in ignored or value is None or value in neutral.get(name, ())):
            is_peer = name in neutral
            what = (
                f"{name}={value!r:.80} is not served. Leave it out." if is_peer else unknown_name("field", name, known)
            )
            if name in _SCORED_PROMPTS and "sampling_params" in known:
                what = f"{name} is a sampling parameter: give it inside 'sampling_params'."
            raise HttpProblem(400, f"{where}: {what}", field=name)
    try:
        return msgspec.convert(kept, kind, strict=strict)
    except msgspec.ValidationError as problem:
        misfit = Misfit.of(problem)
        field = misfit.missing or misfit.unknown or ("" if misfit.in_key else misfit.path)
        text = _reword(kind, field, kept, misfit) if field else misfit.text
        raise HttpProblem(400, f"{where}: {text}", field=field or None) from None


def _reword(kind: type[Any], field: str, fields: Mapping[str, Any], misfit: Misfit) -> str:
    """Word for clients that a field is missing, or has a wrong type or an unknown word.

    Other errors, such as a broken bound, are returned as they are.
    """
    if misfit.missing:
        place = ".".join(filter(None, (misfit.path, misfit.missing)))
        example = _EXAMPLES.get(place)
        return f"{place} is missing." if example is None else f"{place} is missing: give it, for example {example}."
    if misfit.is_unknown_word and field in fields:
        return refused(field, fields[field], allowed_words(get_type_hints(kind)[field], 0))
    if not misfit.got:
        return misfit.text
    expected = misfit.describe_types(_JSON_TYPES)
    if field in fields:
        return refused(field, fields[field], expected)
    return f"{field} is not allowed: must be {expected}, not {_JSON_TYPES.get(misfit.got, misfit.got)}."


def _convert(route: Route, fields: Mapping[str, Any], *, strict: bool) -> Any:
    assert route.body is not None
    return read_fields(route.body, fields, route.path, ignored=route.ignored, neutral=route.neutral, strict=strict)
