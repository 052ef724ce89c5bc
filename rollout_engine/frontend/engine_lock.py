"""The lock of an engine: one thread at a time, signals held back, and only in the process that made it."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rollout_engine.errors import LifecycleError
from rollout_engine.frontend.interrupts import held
from sync.own_process import OwnProcess


class EngineLock:
    """A re-entrant lock around whatever changes an engine. `threading.Condition` takes it.

    Taking it in a forked child raises `LifecycleError` at once: the engine's threads are not in that process, and one
    of them may have held the lock. `on_torn` is called before a block is left that a signal has broken off, which only
    one that came twice does.
    """

    def __init__(self, on_torn: Callable[[], None] = lambda: None) -> None:
        self._lock: Any = threading.RLock()
        self._on_torn = on_torn
        self._process = OwnProcess()
        self._holds: list[held] = []
        """One hold on signals for each time that the lock is taken now."""

    @property
    def is_usable(self) -> bool:
        """Whether this process may take it."""
        return self._process.is_here

    def require_usable(self) -> None:
        """Raise `LifecycleError` in a forked child."""
        if not self._process.is_here:
            raise LifecycleError(self._process.explain("The engine"))

    def __enter__(self) -> "EngineLock":
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self) -> bool:
        """Wait for it. Raises `LifecycleError` in a forked child."""
        self.require_usable()
        hold = held()
        hold.__enter__()
        try:
            self._lock.acquire()
        except BaseException:  # a signal that came twice
            hold.__exit__(None, None, None)
            raise
        self._holds.append(hold)
        return True

    def release(self) -> None:
        """Give it back. Raises what the handler of a held signal raises."""
        hold = self._holds.pop()
        if hold.is_torn:
            self._on_torn()
        self._lock.release()
        hold.__exit__(None, None, None)

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())

    def _release_save(self) -> tuple[Any, list[held]]:
        """For `Condition.wait`, which gives it back however often it was taken."""
        holds, self._holds = self._holds, []
        return self._lock._release_save(), holds

    def _acquire_restore(self, state: tuple[Any, list[held]]) -> None:
        self._lock._acquire_restore(state[0])
        self._holds = state[1]
