"""Parts of all readers of calls: bounds, spaces, and a call as a JSON object."""

import re
from typing import Any

from rollout_engine.base.tool_call import ToolCall
from rollout_engine.text.formats.tool_arguments import parse_json

MAX_CALLS = 64
"""Calls looked at in one answer."""
MAX_CALL_CHARACTERS = 1 << 16
"""Characters of one call."""
MAX_PROBLEM_CHARACTERS = 200
"""Characters of a broken call that are shown."""
_MAX_END_TOKENS = 4
_END_TOKEN = re.compile(r"<\|\w+\|>|</s>|<(?:\w+:)?eos>")
"""The token that ends an answer, as the common families spell it."""


class Unreadable(Exception):
    """Raised by readers with the reason why there is no call."""


def call_of_json(value: Any) -> ToolCall:
    """The call that an object with name and arguments is. Raises `Unreadable`."""
    if not isinstance(value, dict):
        raise Unreadable(f"a JSON {type(value).__name__}, not an object with name and arguments")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models quote their arguments once more
        try:
            arguments = parse_json(arguments)
        except (ValueError, RecursionError):
            raise Unreadable("its arguments are a text") from None
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise Unreadable("it names no tool")
    if not isinstance(arguments, dict):
        raise Unreadable(f"its arguments are a {type(arguments).__name__}, not an object")
    return ToolCall(name, arguments)


def after_space(text: str, at: int) -> int:
    """The place of the first character from `at` on that is no space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def without_end_tokens(text: str) -> str:
    """The text without the tokens that end an answer, and the spaces before them."""
    text = text.rstrip()
    for _ in range(_MAX_END_TOKENS):
        start = text.rfind("<")
        if start < 0 or not _END_TOKEN.fullmatch(text, start):
            break
        text = text[:start].rstrip()
    return text
