"""Wakes the coroutines that wait for outputs, from the thread that delivers them."""

import asyncio
import itertools
import threading
import weakref
from typing import Protocol

_WAKES = 32
"""Coroutines wakened in one iteration of a loop, so that its other callbacks wait for no more than these."""


class Wakeable(Protocol):
    """Something that a coroutine waits for, such as an `asyncio.Event`."""

    def set(self) -> None:
        """Let the coroutine continue; called on its loop."""


class LoopWaker:
    """Wakes coroutines of one event loop from any thread, a few per iteration."""

    _of: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker]" = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._waiting: dict[Wakeable, None] = {}
        self._lock = threading.Lock()
        self._scheduled = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> "LoopWaker":
        """Return the waker of this loop."""
        waker = cls._of.get(loop)
        return cls._of.setdefault(loop, cls(loop)) if waker is None else waker

    def wake(self, event: Wakeable) -> bool:
        """Set an event of the loop soon. False: the loop is closed, and no coroutine waits for its events any more."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            return False
        with self._lock:
            self._waiting[event] = None
            if self._scheduled:
                return True
            self._scheduled = True
        try:
            loop.call_soon_threadsafe(self._run)
        except RuntimeError:  # it was closed just now
            return False
        return True

    def _run(self) -> None:
        with self._lock:
            chosen = list(itertools.islice(self._waiting, _WAKES))
            for event in chosen:
                del self._waiting[event]
            self._scheduled = again = bool(self._waiting)
        for event in chosen:
            event.set()
        if again:
            asyncio.get_running_loop().call_soon(self._run)
