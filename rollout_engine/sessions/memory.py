"""Approximate memory of sessions: each one counts its own, in a sum that all of them share."""

import threading
from collections.abc import Mapping
from typing import Any, Self

BYTES_OF_ID = 40
"""Memory of a token id in a list: a reference, and an int of its own at most."""
BYTES_OF_REFERENCE = 8
BYTES_OF_NODE = 512
"""Memory of a message and its place in the forest, apart from its text."""
BYTES_OF_TURN = 1024
"""Memory of an answer, apart from its ids, columns and texts."""
BYTES_OF_ROW_ID = 3 * BYTES_OF_REFERENCE
"""Memory of a token of a row's response once the row is made: its id, its place in the mask, its turn."""
_BYTES_OF_VALUE = 64
"""Memory of a container, a number or a text, apart from its contents."""


class Memory:
    """Bytes that one holder keeps, up to a bound. Any thread may call it."""

    def __init__(self, most: int, total: "Memory | None" = None) -> None:
        """`total`: that of all holders, in which these bytes count too; None: there are no others."""
        self.most = most
        self._total, self._num_bytes, self._is_closed = total, 0, False
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept."""
        return self._num_bytes

    @property
    def is_full(self) -> bool:
        """Whether no more are to be kept."""
        return self._num_bytes >= self.most

    @property
    def full(self) -> "Memory | None":
        """The memory that is full: this one, or else the total; None if neither is."""
        if self.is_full:
            return self
        return None if self._total is None else self._total.full

    def add(self, num_bytes: int) -> None:
        """Count bytes that are kept from now on, beyond the bound too. Negative: bytes that are kept no more."""
        with self._lock:
            if not self._is_closed:
                self._num_bytes += num_bytes
                if self._total is not None:
                    self._total.add(num_bytes)

    def take(self, num_bytes: int) -> "Memory | None":
        """Count bytes if they fit; else return the memory that has no room for them, this one or the total."""
        with self._lock:
            if not self._is_closed and self._num_bytes + num_bytes > self.most:
                return self
            if not self._is_closed and self._total is not None and (full := self._total.take(num_bytes)) is not None:
                return full
            self._num_bytes += 0 if self._is_closed else num_bytes
        return None

    def close(self) -> None:
        """Count nothing any more: the holder has forgotten all of it."""
        with self._lock:
            if not self._is_closed and self._total is not None:
                self._total.add(-self._num_bytes)
            self._is_closed, self._num_bytes = True, 0

    def share(self, divisor: int) -> int:
        """A part of the bound, for something that must not fill it alone."""
        return max(1, self.most // divisor)

    @classmethod
    def without_bound(cls) -> Self:
        """A memory that never is full, for a holder of its own."""
        return cls(1 << 62)


def bytes_of_value(value: Any) -> int:
    """Approximate memory of a value of JSON; of anything else, that of a number."""
    if isinstance(value, str | bytes):
        return _BYTES_OF_VALUE + len(value)
    if isinstance(value, Mapping):
        return _BYTES_OF_VALUE + sum(bytes_of_value(name) + bytes_of_value(each) for name, each in value.items())
    if isinstance(value, list | tuple):
        return _BYTES_OF_VALUE + sum(map(bytes_of_value, value))
    return _BYTES_OF_VALUE
