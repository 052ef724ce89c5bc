"""Holds signals back while an engine changes its state, so that Ctrl-C never leaves it half changed.

    with held():            # a signal that arrives here is handled at the end of the outermost such block,
        ...
        deliver()           # at this point of it,
        with allowed():     # or at once in here, around user code
            ...

It holds the signals that Python runs handlers for: in the main thread, those of `HELD` with a handler in Python.
Everywhere else these blocks do nothing. A signal repeated after `PATIENCE_SECONDS` is handled at once: the engine
may hang. The change in progress may then be half done, which `held.is_torn` reports.
"""

import importlib
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

HELD = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGALRM", "SIGINT") if hasattr(signal, name))
"""Signals that commonly have a handler that raises. SIGINT is restored last: it is the likeliest to arrive."""
PATIENCE_SECONDS = 2.0

Handler = Callable[[int, FrameType | None], Any]
_raw: Any = importlib.import_module("_signal" if importlib.util.find_spec("_signal") else "signal")
"""The functions under those of `signal`, which take 20 times as long to look for the names of numbers."""
_get, _set = _raw.getsignal, _raw.signal


class _Signals:
    """Signals held now. Only the main thread changes it.

    A signal may arrive between any two lines. `_install` and `_restore` are ordered so that it is then either held, or
    handled at once with nothing left behind that is wrong for the next block.
    """

    def __init__(self) -> None:
        self.depth = 0
        """Blocks of `held` that we are in."""
        self.num_forced = 0
        """Signals that were handled inside a block, because they were repeated."""
        self._installed = False
        self._handlers: dict[int, Handler] = {}
        """Handlers that ours replaces while signals are held."""
        self._waiting: list[int] = []
        self._since = 0.0
        self._ours = self._on_signal

    def begin(self) -> None:
        if self._installed:
            self.depth += 1
        else:
            self._install()

    def end(self) -> None:
        if self.depth > 1:
            self.depth -= 1
        elif self._installed:
            self._restore()
            self.deliver()

    def suspend(self) -> int:
        """Hold no signals until `resume`; returns the depth that it takes."""
        depth = self.depth
        if depth and self._installed:
            self._restore()
            self.deliver()
        return depth

    def resume(self, depth: int) -> None:
        if depth:
            self._install()
            self.depth = depth

    def deliver(self) -> None:
        """Handle the signals that wait. Raises any error of their handlers."""
        while self._waiting:
            number = self._waiting.pop(0)
            self._handlers[number](number, None)

    def forget(self) -> None:
        """Hold nothing any more in a forked child: the thread that was inside a block is not in this process."""
        self._waiting.clear()
        self._restore()

    def _install(self) -> None:
        if self._waiting:  # an interrupt arrived while earlier ones were being handled: it stands for all of them
            self._waiting = [number for number in self._waiting if number != signal.SIGINT]
        try:
            self.depth = 1
            for number in HELD:
                handler = _get(number)
                if callable(handler) and handler is not self._ours:
                    self._handlers[number] = handler
                    _set(number, self._ours)
            self._installed = True
        except BaseException:
            self._restore()
            raise

    def _restore(self) -> None:
        self._installed = False
        try:
            for number in HELD:
                if _get(number) is self._ours:
                    _set(number, self._handlers[number])
        finally:
            self.depth = 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._waiting:
            self._since = now
        again = number in self._waiting and now - self._since >= PATIENCE_SECONDS
        if self.depth and not again:
            if number not in self._waiting:
                self._waiting.append(number)
            return
        if again:
            self._waiting.remove(number)
            self.num_forced += 1
        self._handlers[number](number, frame)


_signals = _Signals()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_signals.forget)


class held:
    """Hold signals back until the end of the block; blocks may be nested."""

    __slots__ = ("_here", "_num_forced")

    def __enter__(self) -> "held":
        self._here, self._num_forced = in_main_thread(), _signals.num_forced
        if self._here:
            _signals.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._here:
            _signals.end()

    @property
    def is_torn(self) -> bool:
        """Whether a repeated signal was handled inside the block: its work may be half done."""
        return self._here and self._num_forced != _signals.num_forced


class allowed:
    """Handle signals at once inside the block, and those that wait at its beginning."""

    __slots__ = ("_depth",)

    def __enter__(self) -> None:
        self._depth = _signals.suspend() if in_main_thread() else 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _signals.resume(self._depth)


def deliver() -> None:
    """Handle the signals that wait. Call it at points that an exception does not harm."""
    if _signals.depth and in_main_thread():
        _signals.deliver()


def in_main_thread() -> bool:
    """Whether this is the thread that handles signals."""
    return threading.get_ident() == threading.main_thread().ident
