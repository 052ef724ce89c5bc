"""Limits on each client's work in flight at a core; work beyond them is refused, and takes nothing from others.

There is no quota on requests per second: clients are taken in turn (`rollout_engine.process.inbox`), and docs/limits.md
explains this.
"""

import threading
from collections import Counter
from collections.abc import Iterable

from rollout_engine.base.errors import RequestError
from rollout_engine.base.messages import SequenceEnd
from rollout_engine.process.client_routing import client_of

MAX_SAMPLES = 1 << 18
"""Samples of one client in flight: a batch of 16,384 prompts with n=16."""
MAX_CALLS = 1024
"""Calls of one client that have begun and not ended."""


class Quotas:
    """Counts the samples and the calls of each client. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: Counter[int] = Counter()
        self._calls: Counter[int] = Counter()

    def add_samples(self, client_index: int, n: int) -> None:
        """Count a request of n samples. Raises `RequestError`, nothing counted, if they are too many."""
        self._add(self._samples, client_index, n, MAX_SAMPLES, "samples", "n")

    def end_samples(self, ends: Iterable[SequenceEnd]) -> None:
        """Count the ends of samples."""
        for end in ends:
            self._remove(self._samples, client_of(end.sequence_id), 1)

    def refuse_samples(self, client_index: int, n: int) -> None:
        """Take back the samples of a request that was refused after all."""
        self._remove(self._samples, client_index, n)

    def add_call(self, client_index: int) -> None:
        """Count a call that begins. Raises `RequestError`, nothing counted, if they are too many."""
        self._add(self._calls, client_index, 1, MAX_CALLS, "calls", "name")

    def end_call(self, client_index: int) -> None:
        """Count the end of a call."""
        self._remove(self._calls, client_index, 1)

    def forget(self, client_index: int) -> None:
        """Drop the counts of a client that has left."""
        with self._lock:
            del self._samples[client_index], self._calls[client_index]

    def _add(self, counts: Counter[int], client_index: int, number: int, limit: int, what: str, field: str) -> None:
        with self._lock:
            has = counts[client_index]
            if has + number > limit:
                bound = f"at most {limit:,} {what} of one client in flight"
                problem = f"{number:,} more {what} are too many: this client has {has:,} of {limit:,} in flight"
                raise RequestError(f"{problem}. Wait until some have ended, or abort them.", field=field, bound=bound)
            counts[client_index] += number

    def _remove(self, counts: Counter[int], client_index: int, number: int) -> None:
        with self._lock:
            if counts[client_index] > number:
                counts[client_index] -= number
            else:
                del counts[client_index]
