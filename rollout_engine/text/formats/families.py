"""How families write calls that they have tokens for. Their readers are made for one spelling of the tags.

"deepseek"   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add
             ```json
             {"a": 1}
             ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>                                        DeepSeek V3, R1
             ...<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>...              DeepSeek V3.1
"dsml"       <｜DSML｜function_calls><｜DSML｜invoke name="add">
             <｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
             </｜DSML｜invoke></｜DSML｜function_calls>                                        DeepSeek V3.2, V4
"kimi"       <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0
             <|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>  Kimi K2 and later
"mistral"    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]                             until Mistral Small 3.1
             [TOOL_CALLS]add[ARGS]{"a": 1}                                                    later ones, Magistral
"gemma"      <start_function_call>call:add{a:1,b:<escape>x<escape>}<end_function_call>        FunctionGemma
             <|tool_call>call:add{a:1,b:<|"|>x<|"|>}<tool_call|>                              Gemma 4
"minimax"    <minimax:tool_call><invoke name="add"><parameter name="a">1</parameter></invoke></minimax:tool_call>
"nemotron"   <TOOLCALL>[{"name": "add", "arguments": {"a": 1}}]</TOOLCALL>                    Nemotron until 2
"pythonic"   [add(a=1), add(a=2)], or a block of code that is marked tool_code                Llama 3.2 and 4, Gemma 3
"""

import re
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from rollout_engine.base.tool_call import ToolCall
from rollout_engine.text.formats.brace_values import BraceReader
from rollout_engine.text.formats.call_reader import CallReader
from rollout_engine.text.formats.framed_calls import Frame, FramedCalls
from rollout_engine.text.formats.json_calls import Unreadable, after_space, call_of_json
from rollout_engine.text.formats.pythonic_calls import PythonicCalls
from rollout_engine.text.formats.tool_arguments import parse_json, raw_json
from rollout_engine.text.formats.transcript import MARK, Spell

_MAX_NAME = 1024
"""Characters of a name."""
_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
_MISTRAL_NAME = re.compile(r"\s*([\w.\-/:]+)\s*")
_DEEPSEEK_NAME = re.compile(r"\s*([^\n`]+?)\s*```(?:json)?\s*")
_DEEPSEEK_END = re.compile(r"\s*```")
_GEMMA_NAME = re.compile(r"\s*call:\s*([^\s{]+)\s*")
_HEAD = re.compile(r"\s+name=\"([^\"\n]+)\"\s*>\s*")


class Family(NamedTuple):
    """The tags of a family, each of which may be one token, and its reader."""

    tags: tuple[str, ...]
    make: Callable[[Spell], CallReader]
    lesson: tuple[str, ...]
    """A template that contains one of these teaches the form."""
    call_id: Callable[[str, int], str] | None = None


def _deepseek(spell: Spell) -> CallReader:
    separator = spell("<｜tool▁sep｜>")

    def read(text: str, at: int) -> tuple[list[ToolCall], int]:
        name, at = _text_until(text, at, separator)
        at = after_space(text, at)
        if text.startswith("{", at):
            arguments, end = _read_object(text, at)
            return [ToolCall(name, arguments)], end
        match = _DEEPSEEK_NAME.match(text, at)
        if match is None:
            raise Unreadable("neither NAME, separator and JSON, nor function, separator, NAME and a block of JSON")
        arguments, end = _read_object(text, match.end())
        closing = _DEEPSEEK_END.match(text, end)
        return [ToolCall(match[1], arguments)], closing.end() if closing else end

    frame = Frame(spell("<｜tool▁call▁begin｜>"), spell("<｜tool▁call▁end｜>"), read)
    return FramedCalls([frame], [spell("<｜tool▁calls▁begin｜>"), spell("<｜tool▁calls▁end｜>")])


def _kimi(spell: Spell) -> CallReader:
    begin = spell("<|tool_call_argument_begin|>")

    def read(text: str, at: int) -> tuple[list[ToolCall], int]:
        written, at = _text_until(text, at, begin)
        match = _KIMI_ID.fullmatch(written)
        if match is None:
            raise Unreadable("it names no tool")
        arguments, end = _read_object(text, at)
        return [ToolCall(match[1], arguments)], end

    frame = Frame(spell("<|tool_call_begin|>"), spell("<|tool_call_end|>"), read)
    return FramedCalls([frame], [spell("<|tool_calls_section_begin|>"), spell("<|tool_calls_section_end|>")])


def _mistral(spell: Spell) -> CallReader:
    call_id, begin = spell("[CALL_ID]"), spell("[ARGS]")

    def read(text: str, at: int) -> tuple[list[ToolCall], int]:
        at = after_space(text, at)
        if text.startswith(("[{", "[ {", "[\n", "{"), at):
            return _read_json_calls(text, at)
        match = _MISTRAL_NAME.match(text, at)
        if match is None:
            raise Unreadable("neither a JSON list of calls, nor NAME[ARGS]{...}")
        at = match.end()
        if text.startswith(call_id, at):
            at = text.find(begin, at, at + _MAX_NAME)
            if at < 0:
                raise Unreadable("it has no [ARGS]")
        at = at + len(begin) if text.startswith(begin, at) else at
        arguments, end = _read_object(text, at)
        return [ToolCall(match[1], arguments)], end

    return FramedCalls([Frame(spell("[TOOL_CALLS]"), "", read)])


def _gemma(spell: Spell) -> CallReader:
    def frame(opening: str, closing: str, quote: str) -> Frame:
        values = BraceReader(spell(quote))

        def read(text: str, at: int) -> tuple[list[ToolCall], int]:
            match = _GEMMA_NAME.match(text, at)
            if match is None or not text.startswith("{", match.end()):
                raise Unreadable("not call:NAME{...}")
            arguments, end = values.read_object(text, match.end())
            return [ToolCall(match[1], arguments)], end

        return Frame(spell(opening), spell(closing), read)

    return FramedCalls(
        [
            frame("<start_function_call>", "<end_function_call>", "<escape>"),
            frame("<|tool_call>", "<tool_call|>", '<|"|>'),
        ]
    )


def _minimax(spell: Spell) -> CallReader:
    read_invoke = _invoke_reader("")

    def read(text: str, at: int) -> tuple[list[ToolCall], int]:
        calls: list[ToolCall] = []
        while text.startswith("<invoke", begin := after_space(text, at)):
            call, at = read_invoke(text, begin + len("<invoke"))
            at += len("</invoke>")
            calls.append(call)
        if not calls:
            raise Unreadable('not <invoke name="NAME">...</invoke>')
        return calls, at

    return FramedCalls([Frame(spell("<minimax:tool_call>"), spell("</minimax:tool_call>"), read)], is_typed=True)


def _dsml(spell: Spell) -> CallReader:
    prefix = spell("｜DSML｜")
    read_invoke = _invoke_reader(prefix)

    def read(text: str, at: int) -> tuple[list[ToolCall], int]:
        call, end = read_invoke(text, at)
        return [call], end

    around = [f"<{slash}{prefix}{name}>" for name in ("function_calls", "tool_calls") for slash in ("", "/")]
    return FramedCalls([Frame(f"<{prefix}invoke", f"</{prefix}invoke>", read)], around)


def _invoke_reader(prefix: str) -> Callable[[str, int], tuple[ToolCall, int]]:
    """A reader of the name and parameters between `<invoke` and `</invoke>`. `prefix`: of all tags."""
    tag = re.escape(prefix)
    value = re.compile(
        rf'<{tag}parameter name="([^"\n]+)"(?:\s+string="(true|false)")?\s*>(.*?)</{tag}parameter>\s*'
        rf"(?=<{tag}parameter |</{tag}invoke>)",
        re.DOTALL,
    )

    def read(text: str, at: int) -> tuple[ToolCall, int]:
        head = _HEAD.match(text, at)
        if head is None:
            raise Unreadable('it names no tool: not <invoke name="NAME">')
        arguments: dict[str, Any] = {}
        at = head.end()
        while (found := value.match(text, at)) is not None:
            written = found[3].replace(MARK, "")
            arguments[found[1]] = parse_json(written) if found[2] == "false" else written
            at = found.end()
        if not text.startswith(f"</{prefix}invoke>", at):
            raise Unreadable('something other than <parameter name="NAME">...</parameter> is in its invoke')
        return ToolCall(head[1], arguments), at

    return read


def _nemotron(spell: Spell) -> CallReader:
    return FramedCalls([Frame(spell("<TOOLCALL>"), spell("</TOOLCALL>"), _read_json_calls)])


def _read_json_calls(text: str, at: int) -> tuple[list[ToolCall], int]:
    """A list of calls as JSON objects, or one."""
    value, end = _read_value(text, after_space(text, at))
    listed = value if isinstance(value, list) else [value]
    if not listed:
        raise Unreadable("a JSON list without a call")
    return [call_of_json(each) for each in listed], end


def _read_object(text: str, at: int) -> tuple[dict[str, Any], int]:
    """The arguments of a call as a JSON object."""
    value, end = _read_value(text, after_space(text, at))
    if not isinstance(value, dict):
        raise Unreadable(f"its arguments are a {type(value).__name__}, not an object")
    return value, end


def _read_value(text: str, at: int) -> tuple[Any, int]:
    value, end = raw_json(text, at)
    if MARK in text[at:end]:  # a tag that was sampled as a token in a text
        value = parse_json(text[at:end].replace(MARK, ""))
    return value, end


def _text_until(text: str, at: int, tag: str) -> tuple[str, int]:
    """The text before a tag on the same line, and the place behind the tag."""
    end = text.find(tag, at, at + _MAX_NAME)
    if end < 0 or "\n" in text[at:end].strip():
        raise Unreadable(f"it has no {tag.replace(MARK, '')}")
    return text[at:end].strip(), end + len(tag)


def _mistral_id(name: str, index: int) -> str:
    return uuid.uuid4().hex[:9]


def _kimi_id(name: str, index: int) -> str:
    return f"functions.{name}:{index}"


_DEEPSEEK_TAGS = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
_KIMI_TAGS = ("calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin", "call_end")
FAMILIES: dict[str, Family] = {
    "deepseek": Family(tuple(f"<｜tool▁{each}｜>" for each in _DEEPSEEK_TAGS), _deepseek, ("<｜tool▁call▁begin｜>",)),
    "dsml": Family(("｜DSML｜",), _dsml, ("｜DSML｜",)),
    "kimi": Family(tuple(f"<|tool_{each}|>" for each in _KIMI_TAGS), _kimi, ("<|tool_call_begin|>",), _kimi_id),
    "mistral": Family(("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), _mistral, ("[TOOL_CALLS]",), _mistral_id),
    "gemma": Family(
        ("<start_function_call>", "<end_function_call>", "<escape>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        _gemma,
        ("<start_function_call>", "<|tool_call>"),
    ),
    "minimax": Family(("<minimax:tool_call>", "</minimax:tool_call>"), _minimax, ("<minimax:tool_call>",)),
    "nemotron": Family(("<TOOLCALL>", "</TOOLCALL>"), _nemotron, ("<TOOLCALL>",)),
    "pythonic": Family((), PythonicCalls, ()),
}
"""Name -> the family."""
