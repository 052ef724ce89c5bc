"""Responses that a later request of the same session may name, up to a bound."""

from typing import Any

_MOST_RESPONSES, _MOST_CHARS = 1024, 1 << 24


class KnownResponses:
    """Ids of responses -> their conversations, of which the oldest are forgotten beyond the bounds.

    Conversations share their earlier messages, so that each adds only its new ones.
    """

    def __init__(self, most: int = _MOST_RESPONSES, most_chars: int = _MOST_CHARS) -> None:
        """`most_chars`: of the messages that responses have added."""
        self._most, self._most_chars, self._num_chars = most, most_chars, 0
        self._known: dict[str, tuple[list[Any], int]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, response_id: str) -> list[Any] | None:
        """The messages up to a response, its own included; None if it is not known."""
        found = self._known.get(response_id)
        return None if found is None else found[0]

    def add(self, response_id: str, earlier: list[Any], new: list[Any]) -> None:
        """Remember a response: `earlier` messages, which another one may share, and its `new` ones."""
        size = _count_chars(new)
        self._known[response_id] = [*earlier, *new], size
        self._num_chars += size
        while len(self._known) > self._most or (self._num_chars > self._most_chars and self._known):
            self._num_chars -= self._known.pop(next(iter(self._known)))[1]


def _count_chars(value: Any) -> int:
    """Characters of all texts in lists and objects."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + _count_chars(each) for key, each in value.items())
    return sum(map(_count_chars, value)) if isinstance(value, list) else 0
