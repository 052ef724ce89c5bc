"""Checks the form of conversations: their messages and the options of their chat template.

A message is a dictionary with "role" and "content"; templates may read further keys ("tool_calls", "name",
"reasoning_content"). Content is text, or OpenAI's list of parts: of text, and of pictures (`picture_parts`). Tool calls
may be in OpenAI's form, with arguments as JSON text, or in transformers', with an object.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from rollout_engine.base.errors import RequestError
from rollout_engine.text.picture_parts import as_picture_part, hint_of_other_part, is_picture
from rollout_engine.text.reasoning_keys import KEYS

PROMPT_KINDS = ("prompt", "prompt_token_ids", "messages")
"""Keys that make a dictionary a prompt rather than a message."""

_TEXT_PARTS = ("text", "input_text", "output_text")
_TEMPLATE_ARGUMENTS = {
    "messages",
    "conversation",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "tokenizer_kwargs",
    "sanitize_control_tokens",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
    "padding",
    "truncation",
    "max_length",
}


class ChatOptions(TypedDict, total=False):
    """Options of the chat template, which turns a conversation into text."""

    tools: list[dict[str, Any] | Callable[..., Any]] | None
    """JSON schemas of functions, or functions whose type hints and docstrings give the schemas."""
    chat_template: str | None
    """A Jinja template, or the name of one of the tokenizer's templates; None: the tokenizer's default."""
    chat_template_kwargs: dict[str, Any] | None
    """Variables of the template, for example {"enable_thinking": False}."""
    add_generation_prompt: bool | None
    """End the prompt with the header of the assistant's next message. None: yes, unless `continue_final_message`."""
    continue_final_message: bool
    """Leave the last message open for the model to continue."""


CHAT_KEYS = tuple(ChatOptions.__annotations__)


def is_message(value: Any) -> bool:
    """Whether a value is meant as a message: a dictionary with a role or content and no key of a prompt."""
    return isinstance(value, Mapping) and ("role" in value or "content" in value) and not set(PROMPT_KINDS) & set(value)


def is_conversation(value: Any) -> bool:
    """Whether a list holds messages rather than prompts: its first element is one."""
    return isinstance(value, list | tuple) and bool(value) and is_message(value[0])


def as_messages(value: Any) -> list[dict[str, Any]]:
    """Return a conversation's messages in the one form that is rendered. Raises `RequestError` naming the message.

    Content is a str, or a list of {"type": "text", "text": ...} and of pictures. Arguments of tool calls are objects.
    Keys whose value is None are left out, and so is an empty "tool_calls": templates ask whether a key is there.
    Content may be absent next to tool calls or thinking ("reasoning_content").
    """
    if not isinstance(value, list | tuple) or not value:
        raise RequestError.for_field("messages", value, "a list of at least one message")
    return [_as_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def check_chat_options(fields: Mapping[str, Any]) -> None:
    """Raise `RequestError` for an option of `ChatOptions` that has the wrong form."""
    for i, tool in enumerate(_of_type(fields, "tools", list) or ()):
        if not isinstance(tool, Mapping) and not callable(tool):
            raise RequestError.for_field(f"tools[{i}]", tool, "a dict (a JSON schema) or a function")
    _of_type(fields, "chat_template", str)
    for name in _of_type(fields, "chat_template_kwargs", dict) or ():
        if not isinstance(name, str) or name in _TEMPLATE_ARGUMENTS:
            bound = "names of the template's own variables, for example enable_thinking"
            raise RequestError.for_field("chat_template_kwargs", name, bound)
    opens = _of_type(fields, "add_generation_prompt", bool)
    if _of_type(fields, "continue_final_message", bool) and opens:
        hint = "The last message is either left open or followed by a new one."
        raise RequestError.for_field("add_generation_prompt", True, "absent with continue_final_message=True", hint)


def _of_type(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        raise RequestError.for_field(name, value, f"a {kind.__name__}")
    return value


def _as_message(message: Any, field: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        hint = "A list of conversations is a list of prompts." if isinstance(message, list | tuple) else ""
        raise RequestError.for_field(field, message, "a message: a dict with 'role' and 'content'", hint)
    role, content = message.get("role"), message.get("content")
    if len(message) == 2 and isinstance(role, str) and role and isinstance(content, str):  # nearly all: nothing to do
        return dict(message)
    if "role" not in message:
        raise RequestError.for_field(field, dict(message), "a message with 'role'")
    if not isinstance(role, str) or not role:
        raise RequestError.for_field(f"{field}['role']", role, "a str: 'system', 'user', 'assistant' or 'tool'")
    kept = {key: each for key, each in message.items() if each is not None and key != "tool_calls"}
    if kept.get("function_call"):
        hint = "It is OpenAI's former name; no chat template reads it."
        raise RequestError.for_field(f"{field}['function_call']", kept["function_call"], "given as tool_calls", hint)
    calls = _tool_calls(message.get("tool_calls"), f"{field}['tool_calls']")
    if calls:
        kept["tool_calls"] = calls
    if content is None and (calls or any(isinstance(kept.get(key), str) for key in KEYS)):
        return {**kept, "content": ""}
    if "content" not in message:
        raise RequestError.for_field(field, dict(message), "a message with 'content'")
    if isinstance(content, list | tuple):
        return {**kept, "content": [_as_part(part, f"{field}['content'][{i}]") for i, part in enumerate(content)] or ""}
    if not isinstance(content, str):
        hint = "Write data as text first (json.dumps)." if isinstance(content, dict) else ""
        raise RequestError.for_field(f"{field}['content']", content, "a str, or a list of parts", hint)
    return kept


def _tool_calls(calls: Any, field: str) -> list[dict[str, Any]]:
    """Return the tool calls of a message with arguments as objects; none for None. Raises `RequestError`."""
    if calls is None:
        return []
    if not isinstance(calls, list | tuple):
        raise RequestError.for_field(field, calls, "a list of tool calls")
    return [_tool_call(call, f"{field}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, field: str) -> dict[str, Any]:
    """Return one call, {"type": "function", "function": {"name", "arguments"}} or {"name", "arguments"} alone."""
    is_wrapped = isinstance(call, Mapping) and "function" in call
    function = call["function"] if is_wrapped else call
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        bound = "a tool call, {'type': 'function', 'function': {'name': ..., 'arguments': ...}}"
        raise RequestError.for_field(field, call, bound)
    place = f"{field}['function']['arguments']" if is_wrapped else f"{field}['arguments']"
    function = {**function, "arguments": _arguments(function.get("arguments"), place)}
    return {**call, "function": function} if is_wrapped else function


def _arguments(arguments: Any, field: str) -> dict[str, Any]:
    """Return the arguments of a call as an object: OpenAI's clients send them back as JSON text."""
    if arguments is None or arguments == "":
        return {}
    given = arguments
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as problem:
            bound = f"an object, or one as JSON text ({problem})"
            raise RequestError.for_field(field, arguments, bound) from None
    if not isinstance(given, Mapping):
        raise RequestError.for_field(field, arguments, "an object, or one as JSON text")
    return dict(given)


def _as_part(part: Any, field: str) -> dict[str, Any]:
    """Return one content part, of text or of a picture. Raises `RequestError` for audio, or anything else."""
    if is_picture(part):
        return as_picture_part(part, field)
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        got, where = (part, field) if kind is None else (kind, f"{field}['type']")
        bound = "a part of text, {'type': 'text', 'text': ...}, or of a picture, {'type': 'image', 'image': ...}"
        raise RequestError.for_field(where, got, bound, hint_of_other_part(kind))
    if not isinstance(part.get("text"), str):
        raise RequestError.for_field(f"{field}['text']", part.get("text"), "a str")
    return {"type": "text", "text": part["text"]}
