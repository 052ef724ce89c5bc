"""Threads of lower priority, for long work concurrently with the steps, such as receiving weights.

On Linux such a thread, and every thread that it starts, yields to the steps. Idle CPU cores run it at full speed.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from rollout_engine.base.threads import start_thread

_NICENESS = 10
"""Added to the process's niceness: steps get nine tenths of a busy CPU core. A higher value would starve updates."""


def run_in_background(work: Callable[..., object], *args: Any, name: str) -> None:
    """Run `work(*args)` on a new thread of lower priority. Raises `RetryableError` if the system starts no more."""

    def run() -> None:
        _lower_priority()
        work(*args)

    start_thread(run, name=name)


def _lower_priority() -> None:
    """Lower the priority of this thread for the rest of its life: raising it again takes privileges."""
    if sys.platform == "linux":  # elsewhere only processes have a priority
        thread = threading.get_native_id()
        with contextlib.suppress(PermissionError):  # a sandbox may forbid it; the work is done anyway
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
