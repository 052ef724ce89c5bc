"""Threads that give way to the steps: work that is long, and in less of a hurry than requests that run.

On Linux such a thread has a lower priority, and so has every thread that it starts. Idle cores run it as fast as any.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

_NICENESS = 10
"""Added to the process's own. A core that steps keep busy is theirs to nine tenths; more would starve updates."""


def run_in_background(work: Callable[..., object], *args: Any, name: str) -> None:
    """Run `work(*args)` on a thread of its own, which gives way and ends with it."""

    def run() -> None:
        _give_way()
        work(*args)

    threading.Thread(target=run, name=name, daemon=True).start()


def _give_way() -> None:
    """For good: a priority that was given up is not had back without privilege."""
    if sys.platform == "linux":  # where a priority is a thread's
        thread = threading.get_native_id()
        with contextlib.suppress(PermissionError):  # a sandbox forbids it: the work is done all the same
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
