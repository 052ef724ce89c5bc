"""Whether a prompt shows the tools that it is given with: no policy is asked to call tools that it never sees."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rollout_engine.base.errors import RequestError


def first_unshown(text: str, tools: Sequence[Any], render_without: Callable[[], str]) -> str | None:
    """A name that a prompt does not show of its tools and their parameters; None if it shows the tools.

    It shows them if the chat template writes something else without tools; or if the conversation shows them itself,
    which means that the name of each tool, and of each of its parameters, stands in it as a word.

    Args:
        text: the prompt.
        tools: JSON schemas, or functions.
        render_without: renders the same conversation without tools.
    """
    missing = _first_missing(list(_words(tools)), text)
    if missing is None:
        return None
    try:
        return missing if render_without() == text else None
    except RequestError:  # the template wants tools
        return None


def refuse_unshown(tools: Sequence[Any], name: str) -> RequestError:
    """Make the error of tools that a prompt does not show, for example `name`."""
    names = [name for tool in tools for name in _name(tool)]
    bound = "shown by the prompt: this chat template ignores tools"
    advice = "Give a chat_template= that shows them, or name each tool and each of its parameters in a message"
    hint = f"{advice}: '{name}' is in none."
    return RequestError.for_field("tools", names, bound, hint)


def _first_missing(names: Sequence[str], text: str) -> str | None:
    """The first of `names` that does not stand in a text as a word; None if all do.

    The text is read once, however many names there are: a client chooses both.
    """
    words = {name: re.findall(r"\w+", name) for name in names}
    unseen = {word for each in words.values() for word in each}
    found = re.finditer(r"\w+", text)
    while unseen and (word := next(found, None)) is not None:
        unseen.discard(word[0])
    for name, parts in words.items():
        if not unseen.isdisjoint(parts) or (parts != [name] and name not in text):
            return name
    return None


def _words(tools: Iterable[Any]) -> Iterator[str]:
    """The names of tools and of their parameters."""
    for tool in tools:
        yield from _name(tool)
        yield from _parameters(tool)


def _name(tool: Any) -> Iterator[str]:
    name = _function(tool).get("name") if isinstance(tool, Mapping) else getattr(tool, "__name__", None)
    if isinstance(name, str):
        yield name


def _parameters(tool: Any) -> Iterator[str]:
    if not isinstance(tool, Mapping):
        yield from inspect.signature(tool).parameters
        return
    parameters = _function(tool).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    yield from (name for name in (properties if isinstance(properties, Mapping) else ()) if isinstance(name, str))


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool
