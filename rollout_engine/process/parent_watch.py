"""Ends a core's process that loses its parent while the model is loaded. Later `CoreSocket` looks after the lifeline.

A signal of the system alone (`rollout_engine.base.parent_death`) would not do: a core that is killed cannot remove its
directory.
"""

import os
import select
import socket
from collections.abc import Callable

from rollout_engine.base.threads import start_thread

_LOOK_MS = 100
"""How often to look whether the watch is over, or this process has another parent."""


class ParentWatch:
    """A thread that calls `on_death` once the parent is gone, which has the other end of `lifeline` and id `parent`."""

    def __init__(self, lifeline: socket.socket, parent: int, on_death: Callable[[], object]) -> None:
        self._lifeline, self._parent, self._on_death = lifeline, parent, on_death
        self._is_over = False
        start_thread(self._run, name="parent-watch")

    def end(self) -> None:
        """Look no more."""
        self._is_over = True

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._lifeline, 0)  # not its bytes, but its end, which is always reported
        while not poller.poll(_LOOK_MS) and os.getppid() == self._parent and not self._is_over:
            pass
        if not self._is_over:
            self._on_death()
