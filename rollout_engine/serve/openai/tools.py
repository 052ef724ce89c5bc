"""Tool calls in answers, as OpenAI's clients read them, and answers that have to be calls.

tool_choice   "none"           calls stay text
              "auto"           calls are found; they are bound to their schemas where a tool is "strict"
              "required"       the answer begins with a call
              a named tool     the answer is one call of it
"""

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from rollout_engine.episodes.tool_calls import ToolFormat, format_of_template, parse_typed_calls
from rollout_engine.errors import RequestError
from rollout_engine.serve.served import Served

_TAGS: dict[ToolFormat, tuple[str, str, str]] = {
    "hermes": ("<tool_call>", '<tool_call>\n{"name": NAME, "arguments": ', "}\n</tool_call>"),
    "llama3": ('{"name": ', '{"name": NAME, "parameters": ', "}"),
}
"""What a call begins with, all before its arguments, and what ends it."""
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_BEGINS = re.compile(r"<tool_call>|<\|python_tag\|>|^\s*\{")


class ToolParser:
    """Finds the calls in answers to one request.

    Args:
        form: how the chat template teaches to write them.
        tools: JSON schemas.
    """

    def __init__(self, served: Served, form: ToolFormat, tools: Sequence[Any], bound: dict[str, Any] | None) -> None:
        self._codec, self._form, self._tools = served.codec, form, tools
        self.structured_outputs = bound
        """The form that answers are bound to; None where they are free."""

    @classmethod
    def of(
        cls, served: Served, tools: Sequence[Any] | None, tool_choice: Any, chat_template: str | None
    ) -> "ToolParser | None":
        """The parser of a request; None where it has no tools. Raises `RequestError` where a call cannot be forced."""
        named = _named(tool_choice)
        if not tools or tool_choice == "none":
            if named or tool_choice == "required":
                raise RequestError.for_field("tool_choice", tool_choice, 'given with tools; without any, "none"')
            return None
        for index, tool in enumerate(tools):
            function = _function(tool) if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                bound = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
                raise RequestError.for_field(f"tools[{index}]", tool, bound)
        template = chat_template or served.codec.hf.chat_template
        form = format_of_template(str(template))
        if form is None:
            hint = "Give a chat_template that has them."
            raise RequestError.for_field("tools", "tools", "absent: the chat template teaches no form of calls", hint)
        return cls(served, form, tools, _bound(form, [_function(tool) for tool in tools], tool_choice, named))

    def find(self, token_ids: list[int]) -> list[dict[str, Any]]:
        """The calls of an answer. What is broken stays text."""
        found = parse_typed_calls(self._codec.decode(token_ids), self._form, self._tools)
        return [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in found.calls
        ]

    def text_before(self, text: str) -> str:
        """What an answer says before its first call."""
        found = _BEGINS.search(text)
        return text[: found.start()].rstrip() if found else text


def _named(tool_choice: Any) -> str | None:
    """The tool that has to be called; None for none. Raises `RequestError` for what is no choice."""
    if tool_choice in (None, "auto", "none", "required"):
        return None
    function = tool_choice.get("function") if isinstance(tool_choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or tool_choice.get("type", "function") != "function":
        bound = '"auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
        raise RequestError.for_field("tool_choice", tool_choice, bound)
    return name


def _bound(
    form: ToolFormat, functions: list[dict[str, Any]], tool_choice: Any, named: str | None
) -> dict[str, Any] | None:
    """Structured outputs of a choice; None for free answers."""
    is_forced = named is not None or tool_choice == "required"
    if not is_forced and not any(function.get("strict") for function in functions):
        return None
    if form not in _TAGS:
        if not is_forced:
            return None
        hint = f"The chat template writes calls as {form}, whose arguments are texts that no JSON schema binds."
        raise RequestError.for_field("tool_choice", tool_choice, '"auto" or "none"', hint)
    asked = [function for function in functions if named in (None, function["name"])]
    if not asked:
        known = ", ".join(sorted(function["name"] for function in functions))
        raise RequestError.for_field("tool_choice", named, f"the name of one of the tools: {known}")
    trigger, begin, end = _TAGS[form]
    structures = [
        {"begin": begin.replace("NAME", json.dumps(each["name"])), "schema": _arguments(each, is_forced), "end": end}
        for each in asked
    ]
    options = {"at_least_one": is_forced, "stop_after_first": named is not None}
    return {"structural_tag": {"structures": structures, "triggers": [trigger], **options}}


def _arguments(function: dict[str, Any], is_forced: bool) -> Any:
    """The schema of a call's arguments, written as templates write calls; any object in free answers unless strict."""
    schema = function.get("parameters") if is_forced or function.get("strict") else None
    schema = {"type": "object"} if schema is None else schema
    return {"x-guidance": _SPACING, **schema} if isinstance(schema, dict) else schema


def _function(tool: dict[str, Any]) -> Any:
    return tool.get("function", tool)
