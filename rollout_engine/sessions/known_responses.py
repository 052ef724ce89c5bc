"""Responses that a later request of the same session may name, up to a bound."""

from typing import Any

from rollout_engine.sessions.memory import BYTES_OF_REFERENCE, Memory, bytes_of_value

_MOST_RESPONSES, _MOST_BYTES = 1024, 1 << 25


class KnownResponses:
    """Ids of responses -> their conversations, of which the oldest are forgotten beyond the bounds.

    Conversations share their earlier messages, so that each adds only its new ones.
    """

    def __init__(
        self, most: int = _MOST_RESPONSES, most_bytes: int = _MOST_BYTES, memory: Memory | None = None
    ) -> None:
        """`most_bytes`: of the messages that responses have added. `memory`: counts them; None: it does not matter."""
        self._most, self._most_bytes, self._num_bytes = most, most_bytes, 0
        self._memory = Memory.without_bound() if memory is None else memory
        self._known: dict[str, tuple[list[Any], int]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, response_id: str) -> list[Any] | None:
        """The messages up to a response, its own included; None if it is not known."""
        found = self._known.get(response_id)
        return None if found is None else found[0]

    def add(self, response_id: str, earlier: list[Any], new: list[Any]) -> None:
        """Remember a response: `earlier` messages, which another one may share, and its `new` ones."""
        size = bytes_of_value(new) + BYTES_OF_REFERENCE * len(earlier)
        self._known[response_id] = [*earlier, *new], size
        self._count(size)
        while len(self._known) > self._most or (self._num_bytes > self._most_bytes and self._known):
            self._count(-self._known.pop(next(iter(self._known)))[1])

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._memory.add(num_bytes)
