"""Finds the tool calls in an answer. Whatever a policy writes, nothing here raises: what is broken stays text.

"hermes"   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>              Hermes, Qwen2.5, Qwen3
"llama3"   <|python_tag|>{"name": "add", "parameters": {"a": 1}}; {...}               Llama 3.1 and later
"xml"      <tool_call><function=add><parameter=a>1</parameter></function></tool_call>   Qwen3-Coder
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

import msgspec

from envs_adapters.base import BrokenCall, ToolCall
from rollout_engine.errors import RequestError

ToolFormat = Literal["hermes", "llama3", "xml"]

_MAX_CALLS = 64
"""Calls looked at in one answer."""
_MAX_CALL_CHARACTERS = 1 << 16
_MAX_PROBLEM_CHARACTERS = 200
_FRAMED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)\s*>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)\s*>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"


class ToolCalls(msgspec.Struct, frozen=True):
    """The calls of one answer, in order, and what was meant as one."""

    calls: list[ToolCall] = []
    broken: list[BrokenCall] = []


def parse_tool_calls(text: str, form: ToolFormat) -> ToolCalls:
    """Find the calls in an answer's text, special tokens included where the form has some. Never raises."""
    calls: list[ToolCall] = []
    broken: list[BrokenCall] = []
    for number, piece in enumerate(_PIECES[form](text)):
        found: ToolCall | str
        if number == _MAX_CALLS:
            broken.append(BrokenCall(piece[:_MAX_PROBLEM_CHARACTERS], f"more than {_MAX_CALLS} calls in one answer"))
            break
        if len(piece) > _MAX_CALL_CHARACTERS:
            found = f"{len(piece)} characters, more than {_MAX_CALL_CHARACTERS}"
        else:
            found = _xml_call(piece) if form == "xml" else _json_call(piece)
        if isinstance(found, ToolCall):
            calls.append(found)
        else:
            broken.append(BrokenCall(piece[:_MAX_PROBLEM_CHARACTERS], found))
    return ToolCalls(calls, broken)


def parse_typed_calls(text: str, form: ToolFormat, schemas: Iterable[Mapping[str, Any]]) -> ToolCalls:
    """`parse_tool_calls`, with the types that the tools' JSON schemas give to values that are texts ("xml")."""
    found = parse_tool_calls(text, form)
    if form != "xml" or not found.calls:
        return found
    inner = [schema.get("function", schema) for schema in schemas]
    parameters = {schema["name"]: schema.get("parameters", {}) for schema in inner}
    return ToolCalls([with_types(call, parameters.get(call.name, {})) for call in found.calls], found.broken)


def format_of_template(template: str) -> ToolFormat | None:
    """The form of calls that a chat template teaches; None where it names none of these."""
    if "<function=" in template:
        return "xml"
    if "<tool_call>" in template:
        return "hermes"
    return "llama3" if _PYTHON_TAG in template or '"parameters"' in template else None


def check_format(form: str) -> None:
    """Raise `RequestError` for an unknown form of tool calls."""
    if form not in get_args(ToolFormat):
        raise RequestError.for_field("tool_format", form, " or ".join(map(repr, get_args(ToolFormat))))


def with_types(call: ToolCall, schema: Mapping[str, Any]) -> ToolCall:
    """The call of an "xml" answer, whose values are texts, with the types that the tool's JSON schema gives them.

    A value that is not of its type stays a text.
    """
    properties = schema.get("properties", {})
    typed = {name: _typed(value, properties.get(name, {})) for name, value in call.arguments.items()}
    return ToolCall(call.name, typed)


def _framed(text: str) -> Iterator[str]:
    return (match[1] for match in _FRAMED.finditer(text))


def _bare(text: str) -> Iterator[str]:
    """The whole answer is calls, or none is: prose may contain braces."""
    text = text.strip()
    is_tagged = text.startswith(_PYTHON_TAG)
    text = text.removeprefix(_PYTHON_TAG).strip()
    decoder = json.JSONDecoder()
    while text:
        if not text.startswith("{"):
            if is_tagged:
                yield text
            return
        try:
            _, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            if is_tagged or '"name"' in text:
                yield text
            return
        if not is_tagged and '"name"' not in text[:end]:
            return
        yield text[:end]
        text = text[end:].lstrip().removeprefix(";").lstrip()


_PIECES: dict[ToolFormat, Callable[[str], Iterator[str]]] = {"hermes": _framed, "llama3": _bare, "xml": _framed}


def _json_call(piece: str) -> ToolCall | str:
    try:
        found = json.loads(piece)
    except (ValueError, RecursionError) as problem:
        return f"not JSON: {problem}"
    if not isinstance(found, dict):
        return f"a JSON {type(found).__name__}, not an object with name and arguments"
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # some models quote their arguments once more
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return "its arguments are a text"
    return _checked(found.get("name"), arguments)


def _xml_call(piece: str) -> ToolCall | str:
    function = _FUNCTION.fullmatch(piece)
    if function is None:
        return "not <function=NAME>...</function>"
    arguments, rest = {}, function[2]
    at = 0
    while (match := _PARAMETER.match(rest, at)) is not None:
        arguments[match[1]] = match[2]
        at = match.end()
    if rest[at:].strip():
        return "something beside <parameter=NAME>...</parameter>"
    return _checked(function[1], arguments)


def _checked(name: Any, arguments: Any) -> ToolCall | str:
    if not isinstance(name, str) or not name:
        return "it names no tool"
    if not isinstance(arguments, dict):
        return f"its arguments are a {type(arguments).__name__}, not an object"
    return ToolCall(name, arguments)


def _typed(value: Any, schema: Any) -> Any:
    kind = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
    if kind == "string" or not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
