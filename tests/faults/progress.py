"""How far a part of the soak has come, told to the process that watches it; and where it stands, when that asks."""

import asyncio
import faulthandler
import gc
import json
import os
import signal
import sys
import time
from typing import Any

_SECONDS = 0.2
"""Least seconds between two reports."""
_pipe: int | None = None
_last = 0.0


def be_watched(pipe: int) -> None:
    """Report to this descriptor from now on. SIGUSR1 writes the stacks of all threads and tasks to standard error."""
    global _pipe
    _pipe = pipe
    os.set_inheritable(pipe, False)
    signal.signal(signal.SIGUSR1, lambda *_: show_tasks())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, chain=True)


def report(done: int) -> None:
    """Tell how many have been done, of whatever the part counts. No-op where nobody watches."""
    global _last
    now = time.monotonic()
    if _pipe is not None and now - _last > _SECONDS:
        _last = now
        tell({"done": done})


def tell(message: dict[str, Any]) -> None:
    """Send a message to the watching process. Raises `BrokenPipeError` once it is gone."""
    assert _pipe is not None, "nobody watches"
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(_pipe, data) :]


def show_tasks() -> None:
    """Write the stacks of all asyncio tasks to standard error."""
    for each in gc.get_objects():
        if isinstance(each, asyncio.Task) and not each.done():
            each.print_stack(file=sys.stderr)
    sys.stderr.flush()
