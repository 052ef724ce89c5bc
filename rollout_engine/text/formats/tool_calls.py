"""Finds the tool calls in an answer. Nothing that a policy writes raises here: a part that is no call stays text.

"hermes"   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>                  Hermes, Qwen 2.5, Qwen 3
"llama3"   <|python_tag|>{"name": "add", "parameters": {"a": 1}}; {...}                   Llama 3.1 and later
"xml"      <tool_call><function=add><parameter=a>1</parameter></function></tool_call>     Qwen3-Coder
"seed"     <seed:tool_call><function=add>...</function></seed:tool_call>                  Seed-OSS
"glm"      <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>         GLM 4.5 and later

A call ends at the end of its grammar, so that its arguments may contain the tags. Calls that are only drafted between
<think> and </think> are no calls. A tag that is neither closed nor followed by the beginning of a call is prose.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.tool_call import BrokenCall, ToolCall
from rollout_engine.text.formats.families import FAMILIES
from rollout_engine.text.formats.json_calls import (
    MAX_CALL_CHARACTERS,
    MAX_CALLS,
    MAX_PROBLEM_CHARACTERS,
    Unreadable,
    after_space,
    call_of_json,
    without_end_tokens,
)
from rollout_engine.text.formats.tool_arguments import raw_json, typed_arguments

TextForm = Literal["hermes", "llama3", "xml", "seed", "glm"]
"""Forms whose tags count however they are spelled."""
ToolFormat = Literal[
    "hermes",
    "llama3",
    "xml",
    "seed",
    "glm",
    "harmony",
    "deepseek",
    "dsml",
    "kimi",
    "mistral",
    "gemma",
    "minimax",
    "nemotron",
    "pythonic",
]
"""Forms of calls. Those after "glm" are those of `families` and `harmony`."""

PROMPT_END = 32
"""Tokens at the end of a prompt whose text `opens_thinking` reads."""
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)\s*>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\s]+)\s*>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)", re.DOTALL)
_FUNCTION_END = re.compile(r"</function>")
_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*")
_GLM_ARGUMENT = re.compile(
    r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|</?tool_call>|\Z)", re.DOTALL
)
PYTHON_TAG = "<|python_tag|>"
"""Begins calls of Llama 3."""
_LLAMA3_LESSON = re.compile(r'\{\s*"name":\s*function name,\s*"parameters":')
"""How Llama 3's and 4's templates describe a call."""
_THINKING = re.compile(r"<(/?)(?:seed:)?think>")


class ToolCalls(msgspec.Struct, frozen=True):
    """The calls of one answer and the parts that were meant as calls, in their order."""

    found: list[ToolCall | BrokenCall] = []
    texts: list[str] = []
    """The text of each in the answer, tags included."""
    spans: list[tuple[int, int]] = []
    """Start and end of each in the answer."""

    @property
    def calls(self) -> list[ToolCall]:
        """The calls that could be read."""
        return [each for each in self.found if isinstance(each, ToolCall)]

    @property
    def call_texts(self) -> list[str]:
        """The text of each of these calls."""
        return [text for each, text in zip(self.found, self.texts, strict=True) if isinstance(each, ToolCall)]

    @property
    def broken(self) -> list[BrokenCall]:
        """The parts that were meant as calls and are none."""
        return [each for each in self.found if isinstance(each, BrokenCall)]


class _Piece(NamedTuple):
    """A part of an answer that is meant as a call."""

    start: int
    end: int
    """End of the part; both ends include the tags."""
    found: ToolCall | str
    """The call, or the reason why there is none."""
    inner: str
    """The text between the tags."""


_Reader: TypeAlias = Callable[[str, int], tuple[ToolCall, int]]
"""(text, start of a call) -> (the call, its end). Raises `Unreadable`, `ValueError` or `RecursionError`."""


class _Frame(NamedTuple):
    """How a form writes calls between tags."""

    opening: str
    closing: str
    read: _Reader
    begins: re.Pattern[str]
    """Matches text behind the opening tag that is meant as a call even if no closing tag follows."""


def parse_tool_calls(text: str, form: TextForm, *, is_thinking: bool | None = None) -> ToolCalls:
    """Find the calls in an answer's text, special tokens included if the form has some. Never raises.

    `is_thinking`: whether the answer begins with thinking, because the prompt has opened <think>; None: if a </think>
    without its <think> implies it.
    """
    text = without_end_tokens(text)
    pieces = _bare(text, is_thinking) if form == "llama3" else _find_framed_calls(text, _FRAMES[form], is_thinking)
    found: list[ToolCall | BrokenCall] = []
    for number, piece in enumerate(pieces):
        problem = piece.found
        if number == MAX_CALLS:
            problem = f"more than {MAX_CALLS} calls in one answer"
        elif len(piece.inner) > MAX_CALL_CHARACTERS:
            problem = f"{len(piece.inner)} characters, more than {MAX_CALL_CHARACTERS}"
        if isinstance(problem, str):
            found.append(BrokenCall(piece.inner[:MAX_PROBLEM_CHARACTERS], problem))
        else:
            found.append(problem)
    spans = [(piece.start, piece.end) for piece in pieces]
    return ToolCalls(found, [text[start:end] for start, end in spans], spans)


def parse_typed_calls(
    text: str, form: TextForm, schemas: Iterable[Mapping[str, Any]], *, is_thinking: bool | None = None
) -> ToolCalls:
    """`parse_tool_calls`, with the types that the tools' JSON schemas give to values that the form writes as text."""
    parsed = parse_tool_calls(text, form, is_thinking=is_thinking)
    if form in ("hermes", "llama3") or not parsed.calls:
        return parsed
    inner = [schema.get("function", schema) for schema in schemas]
    parameters = {schema["name"]: schema.get("parameters") or {} for schema in inner}
    found = [
        with_types(each, parameters.get(each.name, {})) if isinstance(each, ToolCall) else each for each in parsed.found
    ]
    return ToolCalls(found, parsed.texts, parsed.spans)


def format_of_template(template: str) -> ToolFormat | None:
    """The form of calls that a chat template teaches; None if it teaches none of these."""
    if "<seed:tool_call>" in template:
        return "seed"
    if "<tool_call>" in template:
        return "glm" if "<arg_key>" in template else "xml" if "<function=" in template else "hermes"
    if PYTHON_TAG in template or _LLAMA3_LESSON.search(template):
        return "llama3"
    if all(tag in template for tag in ("<|channel|>", "<|message|>")):
        return "harmony"
    for name, family in FAMILIES.items():
        if any(tag in template for tag in family.lesson):
            return check_format(name)
    return None


def check_format(form: str) -> ToolFormat:
    """Return the form of tool calls that a name names. Raises `RequestError` for another name."""
    known: tuple[ToolFormat, ...] = get_args(ToolFormat)
    for each in known:
        if each == form:
            return each
    raise RequestError.for_field("tool_format", form, " or ".join(map(repr, known)))


def opens_thinking(prompt_end: str) -> bool | None:
    """`is_thinking` of the answer to a prompt that ends with this text: True, or None if the prompt leaves it open."""
    marks = list(_THINKING.finditer(prompt_end))
    return True if marks and not marks[-1][1] and not prompt_end[marks[-1].end() :].strip() else None


def with_types(call: ToolCall, schema: Mapping[str, Any]) -> ToolCall:
    """The call with values of the types that the tool's JSON schema gives them, for forms that write values as text.

    A value that is not of its type stays a text.
    """
    return ToolCall(call.name, typed_arguments(call.arguments, schema))


def _find_framed_calls(text: str, frame: _Frame, is_thinking: bool | None) -> list[_Piece]:
    """Find the calls between the tags of a form, outside of thinking: one more than may be made at most."""
    marks = re.compile(f"{re.escape(frame.opening)}|{re.escape(frame.closing)}|{_THINKING.pattern}")
    pieces: list[_Piece] = []
    at = _end_of_thinking(text, 0) if is_thinking else 0
    may_be_thinking = is_thinking is None
    while len(pieces) <= MAX_CALLS and (mark := marks.search(text, at)) is not None:
        at = mark.end()
        if mark[0] == frame.opening:
            piece = _piece_after(text, mark.start(), at, frame, marks)
            if piece is not None:
                pieces.append(piece)
                at = piece.end
        elif mark[1] == "/" and may_be_thinking:
            pieces.clear()  # the prompt has opened this thinking: all calls so far were drafts
            may_be_thinking = False
        elif mark[1] == "":
            at, may_be_thinking = _end_of_thinking(text, at), False
    return pieces


def _piece_after(text: str, start: int, at: int, frame: _Frame, marks: re.Pattern[str]) -> _Piece | None:
    """The call whose opening tag is `text[start:at]`, or a broken one; None if the tag is prose."""
    try:
        call, length = frame.read(text[at : at + MAX_CALL_CHARACTERS + len(frame.closing)], 0)
        end = after_space(text, at + length)
        if text.startswith(frame.closing, end):
            return _Piece(start, end + len(frame.closing), call, text[at : at + length])
        if end == len(text) or text.startswith(frame.opening, end):
            return _Piece(start, at + length, call, text[at : at + length])
        problem = f"something other than {frame.closing} follows it"
    except (Unreadable, ValueError, RecursionError) as reason:
        problem = str(reason) if isinstance(reason, Unreadable) else f"not JSON: {reason}"
    mark = next((each for each in marks.finditer(text, at) if each[1] != ""), None)
    stop = len(text) if mark is None else mark.start()
    if mark is not None and mark[0] == frame.closing:
        return _Piece(start, mark.end(), problem, text[at:stop])
    return _Piece(start, stop, problem, text[at:stop]) if frame.begins.match(text, at) else None


def _bare(text: str, is_thinking: bool | None) -> list[_Piece]:
    """Find calls without closing tags: behind thinking all is calls, or nothing is, since prose may contain braces."""
    at = after_space(text, 0)
    first = _THINKING.search(text)
    if is_thinking or (first is not None and first.start() == at):
        return _bare_from(text, _end_of_thinking(text, at))[0]
    pieces, end = _bare_from(text, at)
    rest = _THINKING.search(text, end)
    if is_thinking is None and rest is not None and rest[1]:
        pieces, _ = _bare_from(text, rest.end())  # the prompt has opened this thinking: all calls so far were drafts
    return pieces


def _bare_from(text: str, at: int) -> tuple[list[_Piece], int]:
    """The calls that follow one another from `at` on, and the index at which other text begins."""
    pieces: list[_Piece] = []
    at = after_space(text, at)
    is_tagged = text.startswith(PYTHON_TAG, at)
    at = after_space(text, at + len(PYTHON_TAG)) if is_tagged else at
    while at < len(text) and len(pieces) <= MAX_CALLS and (is_tagged or text[at] == "{"):
        try:
            value, end = raw_json(text, at)
        except (ValueError, RecursionError) as problem:
            if is_tagged or '"name"' in text[at:]:
                pieces.append(_Piece(at, len(text), f"not JSON: {problem}", text[at:]))
            break
        if not is_tagged and not _looks_like_call(value):
            break
        try:
            found: ToolCall | str = call_of_json(value)
        except Unreadable as reason:
            found = str(reason)
        pieces.append(_Piece(at, end, found, text[at:end]))
        at = after_space(text, end)
        at = after_space(text, at + 1) if text.startswith(";", at) else at
    return pieces, at


def _end_of_thinking(text: str, at: int) -> int:
    """The end of the thinking that begins at `at`: behind its closing tag, or the end of the text without one."""
    return next((mark.end() for mark in _THINKING.finditer(text, at) if mark[1]), len(text))


def _looks_like_call(value: Any) -> bool:
    """Whether JSON without a tag is meant as a call: an answer may be an object with a name, too."""
    return isinstance(value, dict) and "name" in value and ("parameters" in value or "arguments" in value)


def _read_json(text: str, at: int) -> tuple[ToolCall, int]:
    at = after_space(text, at)
    if not text.startswith(("{", "["), at):
        raise Unreadable("not JSON: it is no object")
    value, end = raw_json(text, at)
    return call_of_json(value), end


def _read_xml(text: str, at: int) -> tuple[ToolCall, int]:
    function = _FUNCTION.match(text, at)
    if function is None:
        raise Unreadable("not <function=NAME>...</function>")
    arguments, at = {}, function.end()
    while (match := _PARAMETER.match(text, at)) is not None:
        if "<parameter=" in match[2]:
            raise Unreadable(f"<parameter={match[1]}> is not closed before the next parameter")
        arguments[match[1]] = match[2]
        at = match.end()
    end = _FUNCTION_END.match(text, at)
    if end is None:
        raise Unreadable("something other than <parameter=NAME>...</parameter> is in its function")
    return ToolCall(function[1], arguments), end.end()


def _read_glm(text: str, at: int) -> tuple[ToolCall, int]:
    name = _GLM_NAME.match(text, at)
    if name is None:
        raise Unreadable("it names no tool")
    arguments, at = {}, name.end()
    while (match := _GLM_ARGUMENT.match(text, at)) is not None:
        if "<arg_key>" in match[1] or "<arg_key>" in match[2]:
            raise Unreadable("an <arg_key> or <arg_value> is not closed before the next argument")
        arguments[match[1].strip()] = match[2]
        at = match.end()
    if not arguments and not text.startswith("</tool_call>", at):
        raise Unreadable("not NAME<arg_key>...</arg_key><arg_value>...</arg_value>")
    return ToolCall(name[1], arguments), at


_XML_BEGINS = re.compile(r"\s*<function")
_FRAMES: dict[TextForm, _Frame] = {
    "hermes": _Frame("<tool_call>", "</tool_call>", _read_json, re.compile(r"\s*[{\[]")),
    "xml": _Frame("<tool_call>", "</tool_call>", _read_xml, _XML_BEGINS),
    "seed": _Frame("<seed:tool_call>", "</seed:tool_call>", _read_xml, _XML_BEGINS),
    "glm": _Frame("<tool_call>", "</tool_call>", _read_glm, re.compile(r"\s*[^\s<]+\s*<arg_")),
}
FRAMED_TAGS: dict[TextForm, tuple[str, str]] = {form: (each.opening, each.closing) for form, each in _FRAMES.items()}
"""The tags before and after a call, of the forms that have both."""
