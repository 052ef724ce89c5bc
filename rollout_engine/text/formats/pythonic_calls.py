"""Finds calls that are written as Python: an answer that is a list of them, or a block of code marked `tool_code`."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from rollout_engine.base.structured_outputs import is_plain
from rollout_engine.base.tool_call import BrokenCall, ToolCall
from rollout_engine.text.formats.call_reader import Found, Schemas, begins_with_calls
from rollout_engine.text.formats.json_calls import (
    MAX_CALL_CHARACTERS,
    MAX_CALLS,
    MAX_PROBLEM_CHARACTERS,
    Unreadable,
    after_space,
    without_end_tokens,
)
from rollout_engine.text.formats.tool_arguments import parse_json
from rollout_engine.text.formats.transcript import MARK, Spell

_MAX_NESTING = 64
_BLOCK = re.compile(r"```tool_code\s*\n(.*?)(?:```|\Z)", re.DOTALL)
_LIST = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_TAGS = ("<|python_start|>", "```tool_code")
_ENDS = ("<|python_end|>",)


class PythonicCalls:
    """Reads such answers: all of one is calls, or nothing is, since prose may contain brackets."""

    reads_drafts = False

    def __init__(self, spell: Spell) -> None:
        """`spell`: as of other families; these have no tags that need to be tokens."""

    def find(self, full: str, start: int, is_thinking: bool | None, tools: Schemas) -> list[Found]:
        """Find all calls from `start` on."""
        text = without_end_tokens(full.replace(MARK, " "))
        begin, end = after_space(text, start), len(text)
        if text.startswith(_TAGS[0], begin):
            begin = after_space(text, begin + len(_TAGS[0]))
        for tag in _ENDS:
            end = len(text[:end].removesuffix(tag).rstrip())
        block = _BLOCK.match(text, begin)
        if block is not None:
            written, end = block[1], block.end()
        elif _LIST.match(text, begin):
            written = text[begin:end]
        else:
            return []
        try:
            calls: list[ToolCall | BrokenCall] = [*_read(written, _orders(tools), is_block=block is not None)]
        except (Unreadable, SyntaxError, ValueError, MemoryError, RecursionError) as reason:
            problem = str(reason) if isinstance(reason, Unreadable) else f"not Python: {reason}"
            calls = [BrokenCall(written[:MAX_PROBLEM_CHARACTERS], problem)]
        return [Found(after_space(text, start), max(end, begin), calls, is_closed=False)]

    def safe_end(self, full: str, start: int, at: int) -> tuple[int, bool]:
        """Return how far the text is surely no call."""
        begins = begins_with_calls(full, start, ("[", *_TAGS))
        return (len(full), False) if begins is False else (start, bool(begins))

    def may_close(self, new: str) -> bool:
        """Return whether new text may have completed a call: only the end decides."""
        return False


def _read(written: str, orders: Mapping[str, list[str]], *, is_block: bool) -> list[ToolCall]:
    if len(written) > MAX_CALL_CHARACTERS:
        raise Unreadable(f"{len(written)} characters, more than {MAX_CALL_CHARACTERS}")
    if is_block:
        values: list[ast.expr] = []
        for statement in ast.parse(written.strip()).body:
            if not isinstance(statement, ast.Expr | ast.Assign):
                raise Unreadable("the code has something other than calls")
            values.append(statement.value)
    else:
        tree = ast.parse(written.strip(), mode="eval").body
        if not isinstance(tree, ast.List):
            raise Unreadable("not a list of calls")
        values = tree.elts
    if not 0 < len(values) <= MAX_CALLS:
        raise Unreadable(f"more than {MAX_CALLS} calls in one answer" if values else "it has no call")
    return [_call(value, orders) for value in values]


def _call(value: ast.expr, orders: Mapping[str, list[str]]) -> ToolCall:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "print" and value.args:
        value = value.args[0]
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name | ast.Attribute):
        raise Unreadable("the code has something other than calls")
    name, arguments = ast.unparse(value.func), dict[str, Any]()
    order = orders.get(name, [])
    if len(value.args) > len(order):
        raise Unreadable("its arguments have no names")
    named = [(keyword.arg, keyword.value) for keyword in value.keywords]
    for key, each in [*zip(order, value.args, strict=False), *named]:
        if key is None:
            raise Unreadable("its arguments have no names")
        arguments[key] = _constant(each)
    return ToolCall(name, arguments)


def _constant(value: ast.expr) -> Any:
    try:
        found = ast.literal_eval(value)
    except (ValueError, TypeError):
        raise Unreadable("an argument is no constant") from None
    if not is_plain(found, _MAX_NESTING):
        raise Unreadable("an argument is no JSON value")
    return parse_json(json.dumps(found))


def _orders(tools: Schemas) -> dict[str, list[str]]:
    """Name of a tool -> its parameters in order."""
    orders = {}
    for schema in tools:
        inner = schema.get("function", schema)
        parameters = inner.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        orders[inner["name"]] = list(properties) if isinstance(properties, Mapping) else []
    return orders
