"""Code of the user's that the engine runs, by thread, so that a watchdog can name and interrupt blocks that hang.

    with UserCode(lambda: "logits processor m:P (apply)"):
        result = processor.apply(...)

An interrupt raises `StepDeadlineError` inside the block and nowhere else, at the next line of Python that its thread
runs there: code that waits in the system, or computes in C, is interrupted only when it returns from there.

A child process that is forked inside the block ends at the end of the block: outside it would be a second engine that
answers the same requests through the same sockets.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import NoReturn

from rollout_engine.base.errors import StepDeadlineError

_running: dict[int, "UserCode"] = {}
"""Thread -> the innermost block that it is in."""
_lock = threading.Lock()


class UserCode:
    """A block that runs code of the user's. `describe` names it."""

    __slots__ = ("_outer", "_pid", "describe", "message", "thread")

    def __init__(self, describe: Callable[[], str]) -> None:
        self.describe = describe
        self.message = ""
        """Message of the error that interrupts it; "": nothing does."""
        self.thread = self._pid = 0
        self._outer: UserCode | None = None

    def __enter__(self) -> None:
        self.thread, self._pid = threading.get_ident(), os.getpid()
        self._outer = _running.get(self.thread)
        _running[self.thread] = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            _end_forked_child(self.describe(), error)
        try:
            self._end()
        except StepDeadlineError:  # it is raised only now
            self._end()
            raise StepDeadlineError(self.message) from None
        if isinstance(error, StepDeadlineError) and self.message:
            raise StepDeadlineError(self.message) from None

    def interrupt(self, message: str) -> None:
        """Raise `StepDeadlineError` in the block, unless it has ended."""
        with _lock:
            if _running.get(self.thread) is self:
                self.message = message
                _raise_in(self.thread, StepDeadlineError)

    def _end(self) -> None:
        with _lock:
            if self._outer is None:
                _running.pop(self.thread, None)
            else:
                _running[self.thread] = self._outer
            if self.message:
                _take_back(self.thread)  # the block may have returned before it was interrupted


def running_on(threads: Iterable[int]) -> UserCode | None:
    """The block that one of these threads is in; None if none is."""
    return next((_running[thread] for thread in threads if thread in _running), None)


def _end_forked_child(what: str, error: BaseException | None) -> NoReturn:
    """End this process, a child that code of the user's has forked and that has left this code.

    Without cleaning up, which would close the parent's resources. `sys.exit` there is an orderly end.
    """
    if isinstance(error, SystemExit):
        os._exit(error.code if isinstance(error.code, int) else int(error.code is not None))
    how = "returned from it" if error is None else f"left it by {type(error).__name__}"
    advice = "end it inside, by os._exit or sys.exit"
    os.write(2, f"{what}: a child process that it forked {how} and was ended: {advice}.\n".encode(errors="replace"))
    os._exit(1)


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Let a thread raise `kind` at its next instruction of Python, in place of a pending exception."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def _take_back(thread: int) -> None:
    """Raise this thread's pending exception here.

    CPython has a call for it, after which its evaluation loop looks for the exception indefinitely: in 3.11 a function
    that is traced (`sys.settrace`: debuggers, coverage) then never begins.
    """
    try:
        _raise_in(thread, StepDeadlineError)
        for _ in range(1000):
            pass
    except StepDeadlineError:
        pass
