"""Conversations of Anthropic's dialect as messages of the engine's.

system                                             a message of the role "system", first
a user's text and image blocks                     one user message
each tool_result block                             a message of the role "tool", at its place
an assistant's thinking, text, tool_use blocks     one message with "reasoning_content", "content", "tool_calls"
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.serve.chat.checked import as_list, as_object, as_picture, as_text, check_keys, choose
from rollout_engine.serve.chat.sealed import unseal
from rollout_engine.serve.media.sources import Source

_IGNORED = ("cache_control", "citations", "caller", "transformations")
"""Keys of blocks that change no token."""
_KEYS = {
    "text": ("type", "text"),
    "image": ("type", "source"),
    "tool_use": ("type", "id", "name", "input"),
    "tool_result": ("type", "tool_use_id", "content", "is_error"),
    "thinking": ("type", "thinking", "signature"),
    "redacted_thinking": ("type", "data"),
}
_OF_ROLE = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
_SOURCES = {"base64": ("type", "media_type", "data"), "url": ("type", "url")}


def read_messages(system: Any, messages: Any) -> list[dict[str, Any]]:
    """The messages of a body. Raises `RequestError` naming the block that is not served."""
    found: list[dict[str, Any]] = []
    if system is not None:
        found.append({"role": "system", "content": _read_words(system, "system", "system")})
    names: dict[str, str] = {}
    for i, message in enumerate(as_list(messages, "messages")):
        place = f"messages[{i}]"
        given = as_object(message, place, 'a message: {"role": ..., "content": ...}')
        check_keys(given, place, ("role", "content"))
        role = choose(given.get("role"), f"{place}['role']", tuple(_OF_ROLE))
        content, place = given.get("content"), f"{place}['content']"
        if role == "assistant":
            found.append(_read_assistant(content, place, names))
        elif role == "system" or isinstance(content, str):
            found.append({"role": role, "content": _read_words(content, place, role)})
        else:
            found += _read_user(content, place, names)
    return found


def is_prefill(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message is the beginning of the answer. Raises `RequestError` if it is a whole one."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        return False
    if "tool_calls" in last or "reasoning_content" in last:
        bound = "of text alone: a last message of the assistant is the beginning of its answer"
        raise RequestError.for_field("messages", f"{len(messages)} messages", f"ended by a user, or {bound}")
    return True


def find_pictures(messages: Any) -> Iterator[Source]:
    """The pictures of messages, those in results of tools included. Wrong forms are left to `read_messages`."""
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        yield from _in_blocks(content, f"messages[{i}]['content']")


def _in_blocks(content: Any, place: str) -> Iterator[Source]:
    for j, block in enumerate(content if isinstance(content, list) else ()):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "image":
            yield _in_image(block, f"{place}[{j}]['source']")
        elif kind == "tool_result":
            yield from _in_blocks(block.get("content"), f"{place}[{j}]['content']")


def _in_image(block: dict[str, Any], place: str) -> Source:
    source = as_object(block.get("source"), place)
    kind = choose(source.get("type"), f"{place}['type']", tuple(_SOURCES), "No files are kept here.")
    check_keys(source, place, _SOURCES[kind])

    def put(picture: Any) -> None:
        block["source"] = picture

    if kind == "url":
        return Source(as_text(source.get("url"), f"{place}['url']"), put, f"{place}['url']")
    media_type = as_text(source.get("media_type"), f"{place}['media_type']")
    data = as_text(source.get("data"), f"{place}['data']")
    return Source(f"data:{media_type};base64,{data}", put, f"{place}['data']")


def _read_blocks(content: Any, place: str, role: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(kind, block, place) of each block, whose keys are checked."""
    for j, each in enumerate(as_list(content, place)):
        where = f"{place}[{j}]"
        block = as_object(each, where, f"a block, with its type: {', '.join(_OF_ROLE[role])}")
        hint = f"No other blocks of this role ({role}) are served."
        kind = choose(block.get("type"), f"{where}['type']", _OF_ROLE[role], hint)
        check_keys(block, where, _KEYS[kind], (*_IGNORED, "toolset_name"))
        yield kind, block, where


def _read_words(content: Any, place: str, role: str) -> str | list[dict[str, Any]]:
    """Content of text, and of images if the role may have them."""
    if isinstance(content, str):
        return content
    return _join_parts([_read_part(*found) for found in _read_blocks(content, place, role)], place)


def _read_part(kind: str, block: dict[str, Any], place: str) -> dict[str, Any]:
    if kind == "image":
        return as_picture(block.get("source"), f"{place}['source']")
    return {"type": "text", "text": as_text(block.get("text"), f"{place}['text']")}


def _join_parts(parts: list[dict[str, Any]], place: str) -> str | list[dict[str, Any]]:
    if not parts:
        raise RequestError.for_field(place, [], "a text, or at least one block")
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _read_user(content: Any, place: str, names: Mapping[str, str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for kind, block, where in _read_blocks(content, place, "user"):
        if kind != "tool_result":
            parts.append(_read_part(kind, block, where))
            continue
        if parts:
            found.append({"role": "user", "content": _join_parts(parts, place)})
            parts = []
        found.append(_read_result(block, where, names))
    if parts or not found:
        found.append({"role": "user", "content": _join_parts(parts, place)})
    return found


def _read_result(block: dict[str, Any], place: str, names: Mapping[str, str]) -> dict[str, Any]:
    call_id = as_text(block.get("tool_use_id"), f"{place}['tool_use_id']")
    content, where = block.get("content"), f"{place}['content']"
    parts: str | list[dict[str, Any]] = content if isinstance(content, str) else ""
    if content and not isinstance(content, str):
        given = as_list(content, where)
        for j, each in enumerate(given):
            choose(as_object(each, f"{where}[{j}]").get("type"), f"{where}[{j}]['type']", ("text", "image"))
        parts = _read_words(given, where, "user")
    message: dict[str, Any] = {"role": "tool", "tool_call_id": call_id, "content": parts}
    if call_id in names:
        message["name"] = names[call_id]
    if block.get("is_error"):
        message["is_error"] = True
    return message


def _read_assistant(content: Any, place: str, names: dict[str, str]) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[str] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for kind, block, where in _read_blocks(content, place, "assistant"):
        if kind == "text":
            texts.append(as_text(block.get("text"), f"{where}['text']"))
        elif kind == "tool_use":
            calls.append(_read_call(block, where))
            names[calls[-1]["id"]] = calls[-1]["function"]["name"]
        else:
            thinking.append(_read_thinking(kind, block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thinking:
        message["reasoning_content"] = "".join(thinking)
    return message | {"tool_calls": calls} if calls else message


def _read_call(block: dict[str, Any], place: str) -> dict[str, Any]:
    call_id, name = (as_text(block.get(key), f"{place}[{key!r}]") for key in ("id", "name"))
    arguments = as_object(block.get("input"), f"{place}['input']")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_thinking(kind: str, block: dict[str, Any], place: str) -> str:
    if kind == "redacted_thinking":
        found = unseal(as_text(block.get("data"), f"{place}['data']"))
        if found is None:
            bound = "one that this server has made: those of others cannot be read"
            raise RequestError.for_field(f"{place}['data']", block["data"], bound)
        return found
    text = as_text(block.get("thinking"), f"{place}['thinking']")
    signature = as_text(block.get("signature") or "", f"{place}['signature']")
    return text or unseal(signature) or ""
