"""Input items of OpenAI's responses as messages of the engine's.

    instructions                        a message of the role "system", first
    message                             a message; a developer's is a system message if the template has no such role
    reasoning, message, function_call   one message of the assistant with "reasoning_content", "content", "tool_calls"
    function_call_output                a message of the role "tool"

An answer is items in a row; a later reasoning item or message begins the next one.
"""

from collections.abc import Iterator
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.serve.chat.checked import as_list, as_object, as_text, check_keys, choose
from rollout_engine.serve.chat.sealed import unseal
from rollout_engine.serve.media.sources import PART_KINDS, Source, source_of_part

_KEYS = {
    "message": ("type", "role", "content"),
    "reasoning": ("type", "summary", "content", "encrypted_content"),
    "function_call": ("type", "call_id", "name", "arguments"),
    "function_call_output": ("type", "call_id", "output"),
}
_IGNORED = ("id", "status", "phase", "caller", "name", "prompt_cache_breakpoint")
_PART_IGNORED = ("annotations", "logprobs", "prompt_cache_breakpoint", "detail", "uuid")
_TEXTS = ("input_text", "output_text", "text", "refusal")
_ROLES = ("user", "system", "developer", "assistant")


def find_pictures(items: Any) -> Iterator[Source]:
    """The pictures of input items. Wrong forms are left to `ItemReader`."""
    for i, item in enumerate(items if isinstance(items, list) else ()):
        for key in ("content", "output"):
            parts = item.get(key) if isinstance(item, dict) else None
            for j, part in enumerate(parts if isinstance(parts, list) else ()):
                if isinstance(part, dict) and part.get("type") in PART_KINDS:
                    yield source_of_part(part, f"input[{i}][{key!r}][{j}]")


class ItemReader:
    """Reads the items of one request, behind the messages of an earlier response.

    Args:
        earlier: messages before the items.
        has_developer: whether the chat template has this role.
    """

    def __init__(self, earlier: list[dict[str, Any]], *, has_developer: bool) -> None:
        self.messages: list[dict[str, Any]] = []
        """The messages of the items."""
        self._has_developer = has_developer
        self._answer: dict[str, Any] | None = None
        """The assistant's message that the next item may belong to; the last of `messages`."""
        self._names = {
            call["id"]: call["function"]["name"] for message in earlier for call in message.get("tool_calls", ())
        }

    def read(self, given: Any) -> None:
        """Add the messages of an input. Raises `RequestError` naming the item that is not served."""
        if isinstance(given, str):
            self.messages.append({"role": "user", "content": given})
            return
        for i, each in enumerate(as_list(given, "input")):
            place = f"input[{i}]"
            item = as_object(each, place, "an item: a message, or another one with its type")
            kind = item.get("type") or ("message" if "role" in item else None)
            hint = "Responses are not stored: send the item itself." if kind == "item_reference" else ""
            kind = choose(kind, f"{place}['type']", tuple(_KEYS), hint)
            check_keys(item, place, _KEYS[kind], _IGNORED)
            if kind == "message":
                self._read_message(item, place)
            elif kind == "reasoning":
                self._read_reasoning(item, place)
            elif kind == "function_call":
                self._read_call(item, place)
            else:
                self._read_output(item, place)

    def _read_message(self, item: dict[str, Any], place: str) -> None:
        role = choose(item.get("role"), f"{place}['role']", _ROLES)
        content = _read_content(item.get("content"), f"{place}['content']")
        if role == "assistant":
            text = "".join(_texts_of(content, f"{place}['content']"))
            answer = self._open_answer(begins="content" in (self._answer or {}) and not self._has_calls)
            answer["content"] = answer.get("content", "") + text
            return
        self._answer = None
        if role == "developer" and not self._has_developer:
            role = "system"
        self.messages.append({"role": role, "content": content})

    def _read_reasoning(self, item: dict[str, Any], place: str) -> None:
        parts = item.get("content") or []
        texts = [
            as_text(as_object(part, f"{place}['content'][{j}]").get("text"), f"{place}['content'][{j}]['text']")
            for j, part in enumerate(as_list(parts, f"{place}['content']"))
        ]
        sealed = item.get("encrypted_content")
        if not texts and sealed is not None:
            text = unseal(as_text(sealed, f"{place}['encrypted_content']"))
            if text is None:
                bound = "one that this server has made: those of others cannot be read"
                raise RequestError.for_field(f"{place}['encrypted_content']", sealed, bound)
            texts = [text]
        if not texts:
            return  # a summary alone is no thinking
        is_begun = self._answer is not None and ("content" in self._answer or self._has_calls)
        answer = self._open_answer(begins=is_begun)
        answer["reasoning_content"] = answer.get("reasoning_content", "") + "".join(texts)

    def _read_call(self, item: dict[str, Any], place: str) -> None:
        call_id, name = (as_text(item.get(key), f"{place}[{key!r}]") for key in ("call_id", "name"))
        arguments = as_text(item.get("arguments"), f"{place}['arguments']")
        self._names[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._open_answer(begins=False).setdefault("tool_calls", []).append(call)

    def _read_output(self, item: dict[str, Any], place: str) -> None:
        self._answer = None
        call_id = as_text(item.get("call_id"), f"{place}['call_id']")
        content = _read_content(item.get("output"), f"{place}['output']")
        message = {"role": "tool", "tool_call_id": call_id, "content": content}
        name = self._names.get(call_id, item.get("name"))
        self.messages.append(message if name is None else {**message, "name": as_text(name, f"{place}['name']")})

    @property
    def _has_calls(self) -> bool:
        return self._answer is not None and "tool_calls" in self._answer

    def _open_answer(self, *, begins: bool) -> dict[str, Any]:
        """The assistant's message that an item belongs to; a new one if the item begins one."""
        if self._answer is None or begins:
            self._answer = {"role": "assistant"}
            self.messages.append(self._answer)
        return self._answer

    def close(self) -> None:
        """Complete messages without words, once all items were read."""
        for message in self.messages:
            message.setdefault("content", "")


def _read_content(content: Any, place: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts = [_read_part(part, f"{place}[{j}]") for j, part in enumerate(as_list(content, place))]
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts or ""


def _read_part(part: Any, place: str) -> dict[str, Any]:
    given = as_object(part, place, "a part, with its type")
    kind = choose(given.get("type"), f"{place}['type']", (*_TEXTS, *PART_KINDS))
    if kind in PART_KINDS:
        return {key: value for key, value in given.items() if key not in ("prompt_cache_breakpoint",)}
    key = "refusal" if kind == "refusal" else "text"
    check_keys(given, place, ("type", key), _PART_IGNORED)
    return {"type": "text", "text": as_text(given.get(key), f"{place}[{key!r}]")}


def _texts_of(content: str | list[dict[str, Any]], place: str) -> list[str]:
    """The texts of an answer, which holds no pictures. Raises `RequestError`."""
    if isinstance(content, str):
        return [content]
    for j, part in enumerate(content):
        if part["type"] != "text":
            raise RequestError.for_field(f"{place}[{j}]['type']", part["type"], "'output_text'")
    return [part["text"] for part in content]
