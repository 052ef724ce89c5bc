"""Tool calls in answers, as OpenAI's clients read them, and answers that have to be calls.

tool_choice   "none"           calls stay text
              "auto"           calls are found; they are bound to their schemas if a tool is "strict"
              "required"       the answer begins with a call
              a named tool     the answer is one call of it
"""

import json
import uuid
from collections.abc import Sequence
from typing import Any, get_args

from rollout_engine.base.errors import RequestError
from rollout_engine.serve.served import Served
from rollout_engine.text.formats.make import make_format
from rollout_engine.text.formats.tool_calls import (
    PROMPT_END,
    TextForm,
    ToolFormat,
    format_of_template,
    opens_thinking,
    parse_typed_calls,
)
from rollout_engine.text.tokenizer import TextCodec

_TAGS: dict[ToolFormat, tuple[str, str, str]] = {
    "hermes": ("<tool_call>", '<tool_call>\n{"name": NAME, "arguments": ', "}\n</tool_call>"),
    "llama3": ('{"name": ', '{"name": NAME, "parameters": ', "}"),
}
"""The beginning of a call, all before its arguments, and its end."""
_TEXT_FORMS: tuple[TextForm, ...] = get_args(TextForm)
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_HEAD = 16
"""Characters by which a call that a stop string has cut is found in the text."""


class ToolParser:
    """Finds the calls in answers to one request.

    Args:
        form: how the answers write them.
        tools: JSON schemas.
        bound: the structured outputs of `structured_outputs`.
        is_forced: whether an answer begins with a call, even if the prompt has opened <think>.
    """

    def __init__(
        self,
        codec: TextCodec,
        form: ToolFormat,
        tools: Sequence[Any],
        bound: dict[str, Any] | None,
        *,
        is_forced: bool,
    ) -> None:
        self._codec, self._form, self._tools, self._is_forced = codec, form, tools, is_forced
        self.structured_outputs = bound
        """The form that answers are bound to; None if they are free."""

    @classmethod
    def of(
        cls, served: Served, tools: Sequence[Any] | None, tool_choice: Any, chat_template: str | None
    ) -> "ToolParser | None":
        """The parser of a request; None if it has no tools. Raises `RequestError` if a call cannot be forced."""
        named = _find_named(tool_choice)
        if not tools or tool_choice == "none":
            if named or tool_choice == "required":
                raise RequestError.for_field("tool_choice", tool_choice, 'given with tools; without any, "none"')
            return None
        for index, tool in enumerate(tools):
            function = _function(tool) if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                bound = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
                raise RequestError.for_field(f"tools[{index}]", tool, bound)
        is_forced = named is not None or tool_choice == "required"
        if chat_template is None:
            form = served.tool_format
        else:  # a client's template is not run more often than its prompt needs
            form = format_of_template(served.codec.find_template(chat_template, tools))
        if is_forced and form not in _TAGS:  # the grammar writes JSON, whatever the template teaches
            form = "llama3"
        if form is None:
            hint = 'Give a chat_template that has them, or tool_choice "required" or a named tool, which need none.'
            raise RequestError.for_field("tools", "tools", "absent: the chat template teaches no form of calls", hint)
        structures = _constrain_answer(form, [_function(tool) for tool in tools], is_forced, named)
        return cls(served.codec, form, tools, structures, is_forced=is_forced)

    def split(
        self, prompt_token_ids: Sequence[int], token_ids: list[int], text: str
    ) -> tuple[list[dict[str, Any]], str]:
        """(calls, words) of an answer, whose decoded text is given: all that is no call stays in its words."""
        codec = self._codec
        is_thinking = False if self._is_forced else opens_thinking(codec.decode(list(prompt_token_ids[-PROMPT_END:])))
        for form in _TEXT_FORMS:
            if form == self._form:
                parsed = parse_typed_calls(codec.decode(token_ids), form, self._tools, is_thinking=is_thinking)
                for written in reversed(parsed.call_texts):
                    text = self._without(text, written)
                return [_call(call.name, call.arguments) for call in parsed.calls], text
        reader = make_format(codec, self._form, None)
        assert reader is not None, "it has a form"
        parts = reader.read(token_ids, text, prompt_end=prompt_token_ids[-PROMPT_END:], tools=self._tools)
        return [_call(call.name, call.arguments) for call in parts.calls], parts.text

    def _without(self, text: str, written: str) -> str:
        """The text without its last such call, which may lack special tokens there, or its end after a stop string."""
        for each in (written, self._codec.remove_special_tokens(written)):
            start = text.rfind(each)
            if start < 0:
                start = text.rfind(each[:_HEAD])
                start = start if each.startswith(text[start:]) else -1
            if start >= 0:
                parts = text[:start].rstrip(), text[start + len(each) :].lstrip()
                return "\n".join(part for part in parts if part)
        return text


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call as OpenAI writes it: its arguments are JSON text."""
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _find_named(tool_choice: Any) -> str | None:
    """The tool that has to be called; None for none. Raises `RequestError` for anything else."""
    if tool_choice in (None, "auto", "none", "required"):
        return None
    function = tool_choice.get("function") if isinstance(tool_choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or tool_choice.get("type", "function") != "function":
        bound = '"auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
        raise RequestError.for_field("tool_choice", tool_choice, bound)
    return name


def _constrain_answer(
    form: ToolFormat, functions: list[dict[str, Any]], is_forced: bool, named: str | None
) -> dict[str, Any] | None:
    """Structured outputs of a choice; None for free answers."""
    if form not in _TAGS or not (is_forced or any(function.get("strict") for function in functions)):
        return None
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
