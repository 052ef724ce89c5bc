"""The lock of an engine: one thread at a time, signals held back, and only in the process that made it."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import TracebackType
from typing import Any

from rollout_engine.base.errors import LifecycleError
from rollout_engine.engine.interrupts import held
from sync.owner_process import OwnerProcess


class EngineLock:
    """A re-entrant lock that every change of an engine takes. `threading.Condition` accepts it.

    Taking it in a forked child raises `LifecycleError` at once: the engine's threads are not in that process, and one
    of them may have held the lock. `on_torn` is called before leaving a block that a signal has interrupted, which only
    a repeated one does.
    """

    def __init__(self, on_torn: Callable[[], None] = lambda: None, *, holds_signals: bool = True) -> None:
        self._lock: Any = threading.RLock()
        self._on_torn, self._hold = on_torn, held if holds_signals else _Nothing
        self._process = OwnerProcess()
        self._holds: list[Any] = []
        """One hold on signals for each time that the lock is taken now."""

    @property
    def is_usable(self) -> bool:
        """Whether this process may take it."""
        return self._process.is_current

    def require_usable(self) -> None:
        """Raise `LifecycleError` in a forked child."""
        if not self._process.is_current:
            raise LifecycleError(self._process.error_message("The engine"))

    def __enter__(self) -> "EngineLock":
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self, timeout: float = -1) -> bool:
        """Wait for it, `timeout` seconds at most (-1: indefinitely), and return whether it is taken.

        Raises `LifecycleError` in a forked child.
        """
        self.require_usable()
        hold, is_taken = self._hold(), False
        hold.__enter__()
        try:
            is_taken = bool(self._lock.acquire(timeout=timeout))
        finally:
            if not is_taken:  # too late, or a repeated signal
                hold.__exit__(None, None, None)
        if is_taken:
            self._holds.append(hold)
        return is_taken

    def release(self) -> None:
        """Release it. Raises any error of the handler of a held signal."""
        hold = self._holds.pop()
        if hold.is_torn:
            self._on_torn()
        self._lock.release()
        hold.__exit__(None, None, None)

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())

    def _release_save(self) -> tuple[Any, list[Any]]:
        """Release the lock however often it was taken, for `Condition.wait`."""
        holds, self._holds = self._holds, []
        return self._lock._release_save(), holds

    def _acquire_restore(self, state: tuple[Any, list[Any]]) -> None:
        self._lock._acquire_restore(state[0])
        self._holds = state[1]


class _Nothing(nullcontext[None]):
    """Holds no signals."""

    is_torn = False
