"""The simulation's clock: events in the order of their times."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Events:
    """Future events in order of time; of equal times the one that was planned first is first."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the simulation began."""
        self.num_done = 0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._num_planned = 0

    def plan(self, at: float, event: Callable[..., object], *arguments: Any) -> None:
        """Call `event` with these arguments at a time that is not over."""
        assert at >= self.now, f"an event at {at} s is planned at {self.now} s"
        self._num_planned += 1
        heappush(self._heap, (at, self._num_planned, event, arguments))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Let events happen until `is_over`, or none is left."""
        heap = self._heap
        while heap and not is_over():
            self.now, _, event, arguments = heappop(heap)
            event(*arguments)
            self.num_done += 1
