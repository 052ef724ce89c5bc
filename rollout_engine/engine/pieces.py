"""Calls that run in pieces: their verb is a generator function, and steps run between two `next` of it."""

from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from rollout_engine.engine.calls import Call


class PiecewiseCalls:
    """Calls that have begun and have pieces left. One piece of one call runs between two steps, the clients in turn.

    Only the driver uses it, inside its lock. An error of a piece is its call's error.
    """

    def __init__(self) -> None:
        self._by_client: dict[int, deque[Call]] = {}
        """Clients with such calls, in the order of their turns."""

    def __len__(self) -> int:
        return sum(map(len, self._by_client.values()))

    def pop(self) -> Call:
        """Remove and return the call whose turn it is. Its client's next turn follows all others'."""
        client, calls = next(iter(self._by_client.items()))
        del self._by_client[client]
        call = calls.popleft()
        if calls:
            self._by_client[client] = calls
        return call

    def add(self, call: Call) -> None:
        """Add a call, as the last of its client."""
        self._by_client.setdefault(call.caller, deque()).append(call)


def advance(call: Call, check: Callable[[], None]) -> bool:
    """Run the next piece of a call, after `check`. True: that was the last, and `call.result` is the verb's.

    A cancelled call runs no more. Raises any error of the piece or of `check`, and the verb's error if the
    deadline is over.
    """
    pieces: Generator[None, None, Any] = call.result
    try:
        if call.future.cancelled():
            pieces.close()
            return True
        check()
        if call.is_late:
            raise call.verb.too_late(call.arguments, begun=True)
        next(pieces)
        return False
    except StopIteration as end:
        call.result = end.value
        return True
    except BaseException:
        pieces.close()
        raise
