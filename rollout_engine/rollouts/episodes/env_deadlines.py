"""Deadlines of the calls under way, watched by one thread."""

import threading
import time

from rollout_engine.base.threads import start_thread
from rollout_engine.rollouts.episodes.env_call import Call


class Deadlines:
    """Calls under way, each of which may take `seconds` at least.

    Exactly one of `end` and the deadline gets each call: removing a key from a dict is atomic.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._running: dict[Call, float] = {}
        self._is_ended = threading.Event()
        self._thread = start_thread(self._watch, name="environment deadlines")

    def begin(self, call: Call, seconds: float = 0.0) -> None:
        """Start the clock of a call. `seconds`: it may take that long, if that is more."""
        call.seconds = max(seconds, self.seconds)
        call.deadline = time.monotonic() + call.seconds
        self._running[call] = call.deadline

    def extend(self, call: Call, seconds: float = 0.0) -> bool:
        """Start the clock of a call again. Returns False if its deadline had passed already."""
        is_in_time = self.end(call)
        if is_in_time:
            self.begin(call, seconds)
        return is_in_time

    def end(self, call: Call) -> bool:
        """Stop the clock of a call. Returns False if the deadline had passed, or the call was never begun."""
        return self._running.pop(call, None) is not None

    def close(self) -> None:
        """Stop watching, and end the thread."""
        self._is_ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        seconds = 0.0
        while not self._is_ended.wait(seconds):
            for call, deadline in self._running.copy().items():
                if deadline <= time.monotonic() and self.end(call):
                    call.on_deadline(call)
            # A call that begins from here on ends later than all these.
            now = time.monotonic()
            seconds = max(0.0, min([*self._running.copy().values(), now + self.seconds]) - now)
