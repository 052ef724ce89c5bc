"""Tools of requests, and answers that have to be calls of them.

tool_choice   "none"           calls stay text
              "auto"           calls are found; they are bound to their schemas if a tool is "strict"
              "required"       the answer begins with a call
              a named tool     the answer is one call of it
"""

import json
from collections.abc import Sequence
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.serve.served import Served
from rollout_engine.text.formats.tool_calls import ToolFormat, format_of_template

_TAGS: dict[ToolFormat, tuple[str, str, str]] = {
    "hermes": ("<tool_call>", '<tool_call>\n{"name": NAME, "arguments": ', "}\n</tool_call>"),
    "llama3": ('{"name": ', '{"name": NAME, "parameters": ', "}"),
}
"""The beginning of a call, all before its arguments, and its end."""
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class RequestTools:
    """The tools of one request, and the form that its answers write calls in.

    Args:
        form: of the calls.
        tools: JSON schemas.
        bound: the structured outputs of `structured_outputs`.
        is_forced: whether an answer begins with a call, even if the prompt has opened <think>.
    """

    def __init__(
        self, form: ToolFormat, tools: Sequence[Any], bound: dict[str, Any] | None, *, is_forced: bool
    ) -> None:
        self.form, self.tools, self.is_forced = form, tools, is_forced
        self.structured_outputs = bound
        """The form that answers are bound to; None if they are free."""

    @classmethod
    def of(
        cls,
        served: Served,
        tools: Sequence[Any] | None,
        tool_choice: Any,
        chat_template: str | None,
        *,
        is_single: bool = False,
    ) -> "RequestTools | None":
        """The tools of a request; None if it has none. Raises `RequestError` if a call cannot be forced.

        `is_single`: whether an answer that has to be a call ends with the first.
        """
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
            hint = (
                "Start the engine with a chat_template= that has one (docs/environments.md lists the forms), or send "
                'tool_choice "required" or a named tool, which need none.'
            )
            names = [_function(tool)["name"] for tool in tools]
            raise RequestError.for_field("tools", names, "absent: the chat template teaches no form of calls", hint)
        structures = _constrain_answer(form, [_function(tool) for tool in tools], is_forced, named, is_single)
        return cls(form, tools, structures, is_forced=is_forced)


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
    form: ToolFormat, functions: list[dict[str, Any]], is_forced: bool, named: str | None, is_single: bool
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
    options = {"at_least_one": is_forced, "stop_after_first": named is not None or is_single}
    return {"structural_tag": {"structures": structures, "triggers": [trigger], **options}}


def _arguments(function: dict[str, Any], is_forced: bool) -> Any:
    """The schema of a call's arguments, written as templates write calls; any object in free answers unless strict."""
    schema = function.get("parameters") if is_forced or function.get("strict") else None
    schema = {"type": "object"} if schema is None else schema
    return {"x-guidance": _SPACING, **schema} if isinstance(schema, dict) else schema


def _function(tool: dict[str, Any]) -> Any:
    return tool.get("function", tool)
