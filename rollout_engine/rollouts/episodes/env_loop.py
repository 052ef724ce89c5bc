"""An event loop on a thread of its own, for environments that await."""

import asyncio
import inspect
import types
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from functools import partial
from threading import Event
from typing import Any

from rollout_engine.base.threads import start_thread
from rollout_engine.base.user_code import UserCode, running_on
from rollout_engine.rollouts.episodes.env_call import Call
from rollout_engine.rollouts.episodes.env_host import failure_of


class EventLoopThread:
    """Runs coroutines of calls at once. `returned(call, result)` gets each finished call, on this thread."""

    def __init__(self, returned: Callable[[Call, Any], object]) -> None:
        """Raises `RetryableError` if no thread starts."""
        self._returned = returned
        self._tasks: set[asyncio.Task[None]] = set()
        started = Event()
        self.thread = start_thread(lambda: asyncio.run(self._main(started)), name="environments that await")
        started.wait()

    def submit(self, call: Call, awaitable: Awaitable[Any] | None = None) -> None:
        """Await `awaitable`, or the result of `call.work()`, which is called on the loop.

        Raises `RuntimeError` if the loop has ended.
        """
        self._loop.call_soon_threadsafe(self._start, call, awaitable)

    def is_blocked_by(self, call: Call) -> bool:
        """Whether the loop is inside this call's own code now, so that nothing else runs."""
        return running_on([self.thread.ident or 0]) is call.code

    def close(self) -> None:
        """Cancel all calls, and end the loop and its thread."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._ended.set)

    async def _main(self, started: Event) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await self._ended.wait()

    def _start(self, call: Call, awaitable: Awaitable[Any] | None) -> None:
        task = self._loop.create_task(self._run(call, awaitable))
        call.stop = partial(self._loop.call_soon_threadsafe, task.cancel)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, call: Call, awaitable: Awaitable[Any] | None) -> None:
        result: Any = None
        try:
            if awaitable is None and call.is_dropped:
                return
            result = await _watch_coroutine(_call(call.work) if awaitable is None else _wait(awaitable), call.code)
        except BaseException as problem:  # an exit would end the loop of the others
            result = failure_of(call.what, problem)
        finally:
            self._returned(call, result)


async def _call(work: Callable[[], Any]) -> Any:
    value = work()
    return await value if inspect.isawaitable(value) else value


async def _wait(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


@types.coroutine
def _watch_coroutine(coroutine: Any, code: UserCode) -> Generator[Any, Any, Any]:
    """Await `coroutine`, each of its runs between two waits being a block of `code`."""
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            with code:
                waits_for = coroutine.send(value) if error is None else coroutine.throw(error)
        except StopIteration as end:
            return end.value
        try:
            value, error = (yield waits_for), None
        except BaseException as problem:
            value, error = None, problem
