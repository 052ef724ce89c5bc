"""Functions that a policy may call as tools: their JSON schemas, and the calls.

Nothing that a policy writes makes a call fail: an error becomes the text that it reads, "Error: ...".
"""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from envs_adapters.base import Message
from rollout_engine.base.errors import ConfigError, StepDeadlineError, error_text, refused, unknown_name
from rollout_engine.base.structs import arguments_struct
from rollout_engine.base.tool_call import ToolCall

_MAX_CHARACTERS = 1 << 18
"""Most characters of the text that a call returns: several of them fit into one observation."""
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ToolFunction(msgspec.Struct, frozen=True):
    """A function as a tool: made by `tool_functions`."""

    function: Callable[..., Any]
    schema: dict[str, Any]
    arguments: type[msgspec.Struct] | None
    """The type that the arguments of a call are checked against; None if the signature gives none."""


def tool_functions(tools: Iterable[Any]) -> dict[str, ToolFunction]:
    """The functions among an environment's or rollout's tools, by name.

    Raises `ConfigError` for a function without type hints or without a docstring that describes it and its arguments,
    for two of one name, and for an object that is neither a function nor a JSON schema.
    """
    found: dict[str, ToolFunction] = {}
    names: set[str] = set()
    for tool in tools:
        name = tool_name(tool)
        if name in names:
            raise ConfigError(f"Two tools have the name '{name}': rename one of them.")
        names.add(name)
        if not isinstance(tool, Mapping):
            found[name] = ToolFunction(tool, _schema(tool, name), _arguments(tool))
    return found


def tool_schemas(tools: Iterable[Any], functions: Mapping[str, ToolFunction]) -> list[dict[str, Any]]:
    """The JSON schemas of tools, functions and schemas in their order, as chat templates take them."""
    return [dict(tool) if isinstance(tool, Mapping) else functions[tool_name(tool)].schema for tool in tools]


def tool_name(tool: Any) -> str:
    """Name of a function or of a JSON schema, {"type": "function", "function": {"name": ...}} or the inner dict alone.

    Raises `ConfigError` for anything else.
    """
    if isinstance(tool, Mapping):
        inner = tool.get("function", tool)
        name = inner.get("name") if isinstance(inner, Mapping) else None
    else:
        name = getattr(tool, "__name__", None) if callable(tool) else None
    if not isinstance(name, str) or not name:
        raise ConfigError(refused("tools", tool, "functions, or JSON schemas with a name"))
    return name


def tool_messages(
    functions: Mapping[str, ToolFunction], calls: Sequence[ToolCall]
) -> list[Message] | Awaitable[list[Message]]:
    """Make the calls of one answer, and return one message of the role "tool" for each; awaitable if one of them is.

    Plain functions are called in their order, then async ones at once.
    """
    texts = [call_tool(functions, call) for call in calls]
    if any(not isinstance(text, str) for text in texts):
        return _await_messages(calls, texts)
    return _as_messages(calls, texts)


def call_tool(functions: Mapping[str, ToolFunction], call: ToolCall) -> str | Awaitable[str]:
    """Make one call and return its result as text, JSON unless it is a text; awaitable if the function is async.

    An unknown name, arguments that the signature does not take, and an exception become "Error: ...".
    """
    tool = functions.get(call.name)
    if tool is None:
        return f"Error: {unknown_name('tool', call.name, functions)}"
    try:
        if tool.arguments is not None:
            read = msgspec.convert(call.arguments, tool.arguments)
            given = {name: getattr(read, name) for name in call.arguments}
        else:
            given = call.arguments
            inspect.signature(tool.function).bind(**given)
    except (msgspec.ValidationError, TypeError) as problem:
        return f"Error: {call.name}: {problem}"
    try:
        result = tool.function(**given)
        return _awaited_text(call.name, result) if inspect.isawaitable(result) else _text(call.name, result)
    except StepDeadlineError:
        raise
    except Exception as problem:
        return _error(problem)


async def _await_messages(calls: Sequence[ToolCall], texts: Sequence[str | Awaitable[str]]) -> list[Message]:
    waiting = [index for index, text in enumerate(texts) if not isinstance(text, str)]
    answers: list[Any] = list(texts)
    for index, text in zip(waiting, await asyncio.gather(*(answers[index] for index in waiting)), strict=True):
        answers[index] = text
    return _as_messages(calls, answers)


async def _awaited_text(name: str, result: Awaitable[Any]) -> str:
    try:
        return _text(name, await result)
    except StepDeadlineError:
        raise
    except Exception as problem:
        return _error(problem)


def _as_messages(calls: Sequence[ToolCall], texts: Sequence[Any]) -> list[Message]:
    return [{"role": "tool", "name": call.name, "content": text} for call, text in zip(calls, texts, strict=True)]


def _text(name: str, result: Any) -> str:
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    if len(text) > _MAX_CHARACTERS:
        return f"Error: {name} returned {len(text)} characters, more than {_MAX_CHARACTERS}."
    return text if text.isascii() else text.encode(errors="replace").decode()


def _error(problem: Exception) -> str:
    return f"Error: {error_text(problem)}"[:_MAX_CHARACTERS].encode(errors="replace").decode()


def _schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema  # takes a second to import

    try:
        return dict(get_json_schema(function))
    except Exception as problem:
        advice = "give every argument a type hint and a line under `Args:` of its docstring"
        raise ConfigError(f"The function '{name}' cannot be a tool: {problem} ({advice}).") from problem


def _arguments(function: Callable[..., Any]) -> type[msgspec.Struct] | None:
    parameters = list(inspect.signature(function).parameters.values())
    if any(each.kind not in _NAMED for each in parameters):
        return None
    try:
        made = arguments_struct("Arguments", parameters, get_type_hints(function))
        msgspec.json.schema(made)  # raises for a type that it cannot check
        return made
    except (TypeError, KeyError, NameError):
        return None
