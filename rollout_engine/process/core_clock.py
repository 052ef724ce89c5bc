"""Converts times between a client's monotonic clock and its core's: two machines each count from their own start."""

from collections import deque
from typing import Any

import msgspec

from rollout_engine.process.wire import Call, Heartbeat, Outputs, Welcome

_NUM_READINGS = 16


class CoreClock:
    """The clock of a core on another machine, as read from its messages; one thread only.

    A message takes time to arrive, so each shows the core's clock a little early. The latest of the last few readings
    is used: a deadline is never converted to one that is later.
    """

    def __init__(self) -> None:
        self._offsets: deque[float] = deque(maxlen=_NUM_READINGS)

    def adjust_times(self, message: Any, now: float) -> None:
        """Read the clock in a message, or put the times in it on this machine's clock."""
        match message:
            case Welcome(clock=clock) | Heartbeat(clock):
                self._offsets.append(clock - now)
            case Outputs(steps):
                for step in filter(lambda step: step.start_time, steps):
                    step.start_time = min(step.start_time - max(self._offsets), now)

    def departing(self, message: Any) -> Any:
        """The message with its deadline on the core's clock."""
        if isinstance(message, Call) and message.deadline is not None:
            return msgspec.structs.replace(message, deadline=message.deadline + max(self._offsets))
        return message


class SharedClock(CoreClock):
    """The clock of a core on the same machine: it is this one's."""

    def adjust_times(self, message: Any, now: float) -> None:
        """Change nothing."""

    def departing(self, message: Any) -> Any:
        """Change nothing."""
        return message
