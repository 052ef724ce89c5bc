"""The form of messages in which two requests of a session are compared.

Equal are: text given as one part and as a string, arguments of calls with other key order, spacing or a 1.0 for a 1,
other ids of tool calls that are renamed consistently, null or empty fields and absent ones. Text is compared to the
letter, pictures by the arrays that the model gets. Of an assistant's message only text, thinking and calls are
compared: clients add fields of their own.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import Picture

Messages: TypeAlias = list[dict[str, Any]]
Key: TypeAlias = bytes
"""Digest of one message in comparable form."""

_encode = msgspec.json.Encoder(order="sorted", enc_hook=str).encode
_THINKING = ("reasoning_content", "reasoning", "thinking")
_KEY_BYTES = 16


def digest(value: Any) -> Key:
    """Digest of a JSON value; the order of keys does not change it."""
    return hashlib.blake2b(_encode(value), digest_size=_KEY_BYTES).digest()


def keys_of(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Key], list[int]]:
    """(the digest of each message that `as_messages` returned, the bytes of each in comparable form).

    Raises `RequestError` for a text with half of a surrogate pair: arguments of calls spell it as "\\ud800".
    """
    keys, sizes, calls = list[Key](), list[int](), dict[str, int]()
    for index, message in enumerate(messages):
        try:
            data = _encode(_comparable(message, calls))
        except UnicodeEncodeError as problem:
            bound = f"text that can be encoded ({problem})"
            raise RequestError.for_field(f"messages[{index}]", dict(message), bound) from None
        sizes.append(len(data))
        keys.append(hashlib.blake2b(data, digest_size=_KEY_BYTES).digest())
    return keys, sizes


def answer_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Text, thinking and calls of an assistant's message in comparable form."""
    thinking = next((message[name] for name in _THINKING if message.get(name)), "")
    calls = [_call(each) for each in message.get("tool_calls") or ()]
    return {"role": "assistant", "content": _text(message.get("content")), "thinking": thinking, "calls": calls}


def without_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without its thinking."""
    return {name: value for name, value in message.items() if name not in _THINKING}


def is_answer(message: Mapping[str, Any]) -> bool:
    """Whether this is a message of the assistant."""
    return message.get("role") == "assistant"


def _comparable(message: Mapping[str, Any], calls: dict[str, int]) -> Any:
    """`calls`: id of each tool call so far -> its number, as which results refer to it."""
    if is_answer(message):
        for call in message.get("tool_calls") or ():
            if isinstance(name := call.get("id"), str):
                calls[name] = len(calls)
        return answer_parts(message)
    kept = {name: value for name, value in message.items() if value not in (None, [])}
    kept["content"] = _text(message.get("content"))
    if isinstance(name := kept.get("tool_call_id"), str) and name in calls:
        kept["tool_call_id"] = calls[name]
    return kept


def _text(content: Any) -> Any:
    """Text, or a list of several parts; None as ""."""
    if isinstance(content, list) and len(content) == 1 and content[0].get("type") == "text":
        return content[0]["text"]
    if isinstance(content, list):
        content = [_picture(each) for each in content]
    return "" if content is None or content == [] else content


def _picture(part: Any) -> Any:
    """A part of content, a picture by its digest."""
    image = part.get("image") if isinstance(part, Mapping) else None
    return {"type": "image", "digest": image.digest.hex()} if isinstance(image, Picture) else part


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function", call)
    return [function.get("name"), _numbers(function.get("arguments") or {})]


def _numbers(value: Any) -> Any:
    """The value with floats that are whole as integers: writers of JSON differ in this."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _numbers(each) for name, each in value.items()}
    return [_numbers(each) for each in value] if isinstance(value, list) else value
