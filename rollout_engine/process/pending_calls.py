"""The calls of one client that have not been answered yet."""

import itertools
import threading
from typing import Any

from rollout_engine.base.errors import EngineDeadError
from rollout_engine.children.values import unpack
from rollout_engine.engine.calls import CallFuture
from rollout_engine.process.wire import Reply


class PendingCalls:
    """Numbers calls, and resolves the future of each by the `Reply` with its number. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held so that no call is added after `fail_all` has failed the others."""
        self._numbers = itertools.count()
        self._calls: dict[int, tuple[str, Any, CallFuture]] = {}
        self._error: EngineDeadError | None = None

    def add(self, title: str, kind: Any) -> tuple[int, CallFuture]:
        """Add a call whose result is of type `kind`. Returns its number and its future, which may have failed at once.

        `title` names the call in errors that are not the engine's own.
        """
        number, future = next(self._numbers), CallFuture()
        future.begin()  # as far as this end can see
        with self._lock:
            if self._error is None:
                self._calls[number] = title, kind, future
            else:
                future.fail(self._error)
        return number, future

    def forget(self, number: int) -> None:
        """Forget a call that was cancelled. No lock: the garbage collector may cancel one while we hold it."""
        self._calls.pop(number, None)

    def resolve(self, reply: Reply) -> None:
        """Give a call its result or its error. A reply to no call is dropped."""
        with self._lock:
            found = self._calls.pop(reply.number, None)
        if found is None:
            return
        title, kind, future = found
        try:
            if reply.failure is not None:
                raise reply.failure.as_error(title)
            body = reply.result if reply.long_result is None else reply.long_result.data
            future.succeed(unpack(body, reply.arrays, kind))
        except Exception as error:
            future.fail(error)

    def fail_all(self, error: EngineDeadError) -> None:
        """Fail every call, and from now on those that are added."""
        with self._lock:
            self._error = error
            calls, self._calls = self._calls, {}
        for _, _, future in calls.values():
            future.fail(error)
