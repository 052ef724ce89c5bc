"""Thinking that messages give apart from their content, under the key that a chat template reads.

Clients send `reasoning_content`, or `reasoning`; templates read one of `reasoning_content`, `reasoning` and `thinking`,
or parts of content of the type "thinking". Which one is found by rendering two answers with marks, once per template.
"""

import re
from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]
Render = Callable[[Messages], str]

KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of messages for thinking."""
_PARTS = "parts"
"""Stands for parts of content of the type "thinking"."""
_MAX_KNOWN = 256
_MARK = "27182818284590452353"
_CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {}}}
_QUESTION: dict[str, Any] = {"role": "user", "content": "A question."}
_SAID: dict[str, Any] = {"role": "assistant", "content": "An answer."}
_CALLED: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "content": "A result.", "name": "look", "tool_call_id": "call00000"}


def reasoning_keys(messages: Messages) -> list[str]:
    """The keys by which messages give thinking apart from their content."""
    return list(dict.fromkeys(key for each in messages if len(each) > 2 for key in KEYS if key in each))


class ReasoningKeys:
    """The keys that templates read."""

    def __init__(self) -> None:
        self._read: dict[str, str | None] = {}
        """Template -> the key that it reads, or `_PARTS`; None: it reads no thinking."""

    def find(self, template: str, messages: Messages, render: Render) -> str | None:
        """The key, or `_PARTS`, under which the thinking of these messages is to be given; None: leave it as it is."""
        given = reasoning_keys(messages)
        words = set(re.findall(r"\w+", template))
        if not given or words.issuperset(given):
            return None
        if template not in self._read:
            if len(self._read) >= _MAX_KNOWN:
                self._read.clear()
            candidates = [key for key in KEYS if key in words]
            candidates += [_PARTS] if "thinking" in words else []
            self._read[template] = next((key for key in candidates if _is_read(key, render)), None)
        return self._read[template]


def with_reasoning(messages: Messages, key: str | None) -> Messages:
    """The messages with their thinking under `key`, a result of `ReasoningKeys.find`."""
    return messages if key is None else [_with_key(message, key) for message in messages]


def _with_key(message: dict[str, Any], key: str) -> dict[str, Any]:
    given = next((each for each in KEYS if isinstance(message.get(each), str)), None)
    if given is None or given == key:
        return message
    rest = {name: value for name, value in message.items() if name != given}
    if key != _PARTS:
        return {**rest, key: message[given]}
    content = rest["content"]
    words = ([{"type": "text", "text": content}] if content else []) if isinstance(content, str) else list(content)
    return {**rest, "content": [{"type": "thinking", "thinking": message[given]}, *words]}


def _is_read(key: str, render: Render) -> bool:
    """Whether thinking under a key reaches the text of an answer, or of a call."""
    thought = {"reasoning_content": _MARK}
    for conversation in ([_QUESTION, _SAID | thought], [_QUESTION, _CALLED | thought, _RESULT]):
        try:
            text = render(with_reasoning(conversation, key))
        except Exception:  # a template may raise anything
            continue
        if _MARK in text and not re.search(rf"""["']{_MARK}""", text):  # not a whole part, written as data
            return True
    return False
