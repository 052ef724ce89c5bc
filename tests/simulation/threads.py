"""What `threading`, `queue`, `time` and `concurrent.futures` offer, over a scheduler: threads are its tasks."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from concurrent.futures._base import DoneAndNotDoneFutures
from contextlib import suppress
from functools import partial
from typing import Any

from tests.simulation.scheduler import CARRIER_NAME, Scheduler, Task


def _no_faults() -> None:
    """Stands for the faults of a start that never fails."""


class SimulatedThreading:
    """Stands for the module `threading`. `before_start` may raise what `Thread.start` raises where none can start."""

    TIMEOUT_MAX = threading.TIMEOUT_MAX

    def __init__(self, scheduler: Scheduler, before_start: Callable[[], None] = _no_faults) -> None:
        self._scheduler = scheduler
        self.Lock = partial(SimulatedLock, scheduler)
        self.RLock = partial(SimulatedRLock, scheduler)
        self.Condition = partial(SimulatedCondition, scheduler)
        self.Event = partial(SimulatedEvent, scheduler)
        self.Thread = partial(SimulatedThread, scheduler, before_start)
        self.Timer = partial(SimulatedTimer, scheduler, before_start)

    def get_ident(self) -> int:
        return self._scheduler.current.number

    def get_native_id(self) -> int:
        return self._scheduler.current.number

    def current_thread(self) -> Any:
        task = self._scheduler.current
        return task if task.thread is None else task.thread

    def main_thread(self) -> Any:
        """No task: signals come to none."""
        return _NoThread()


class _NoThread:
    ident = -1


class SimulatedTime:
    """Stands for the module `time`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._clock, self.sleep = scheduler.clock, scheduler.sleep

    def monotonic(self) -> float:
        return self._clock.now

    perf_counter = monotonic

    def time(self) -> float:
        return self._clock.wall


class SimulatedQueues:
    """Stands for the module `queue`."""

    Empty = queue.Empty

    def __init__(self, scheduler: Scheduler) -> None:
        self.SimpleQueue = partial(SimulatedQueue, scheduler)


class SimulatedQueue:
    """A `queue.SimpleQueue`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._items = scheduler, deque[Any]()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._scheduler.pause()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        deadline = self._scheduler.clock.now + (timeout or 0.0) if timeout is not None or not block else None
        if not self._scheduler.wait(lambda: bool(self._items), deadline, "an item"):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


class SimulatedLock:
    """A `threading.Lock`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: Task | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        deadline = None if blocking and timeout < 0 else self._scheduler.clock.now + (timeout if blocking else 0.0)
        if not self._scheduler.wait(self._is_free, deadline, "a lock"):
            return False
        self._owner = self._scheduler.current
        return True

    def release(self) -> None:
        if self._owner is None:
            raise RuntimeError("release unlocked lock")
        self._owner = None
        self._scheduler.pause()

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_free(self) -> bool:
        return self._owner is None

    def _is_owned(self) -> bool:
        return self._owner is self._scheduler.current

    def _release_save(self) -> Any:
        self._owner = None

    def _acquire_restore(self, _: Any) -> None:
        self._scheduler.wait(self._is_free, None, "a lock")
        self._owner = self._scheduler.current


class SimulatedRLock(SimulatedLock):
    """A `threading.RLock`."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._is_owned() or super().acquire(blocking, timeout):
            self._depth += 1
            return True
        return False

    def release(self) -> None:
        if not self._is_owned():
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if not self._depth:
            super().release()

    def _release_save(self) -> int:
        depth, self._depth = self._depth, 0
        super()._release_save()
        return depth

    def _acquire_restore(self, state: int) -> None:
        super()._acquire_restore(None)
        self._depth = state


class _Waiter:
    is_notified = False


class SimulatedCondition:
    """A `threading.Condition`."""

    def __init__(self, scheduler: Scheduler, lock: Any = None) -> None:
        self._scheduler = scheduler
        self._lock = SimulatedRLock(scheduler) if lock is None else lock
        self._waiters: list[_Waiter] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._lock.__exit__(*error)

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else self._scheduler.clock.now + timeout
        waiter = _Waiter()
        self._waiters.append(waiter)
        state = self._lock._release_save()
        try:
            self._scheduler.wait(lambda: waiter.is_notified, deadline, "a notice")
        finally:
            if not waiter.is_notified:
                self._waiters.remove(waiter)
            self._lock._acquire_restore(state)
        return waiter.is_notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = None if timeout is None else self._scheduler.clock.now + timeout
        while not (result := predicate()):
            left = None if deadline is None else deadline - self._scheduler.clock.now
            if left is not None and left <= 0:
                return result
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        for waiter in self._waiters[:n]:
            waiter.is_notified = True
        del self._waiters[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class SimulatedEvent:
    """A `threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._flag = scheduler, False

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        self._scheduler.pause()

    def clear(self) -> None:
        self._flag = False
        self._scheduler.pause()

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else self._scheduler.clock.now + timeout
        return self._scheduler.wait(self.is_set, deadline, "an event")


class SimulatedThread:
    """A `threading.Thread`."""

    def __init__(
        self,
        scheduler: Scheduler,
        before_start: Callable[[], None],
        group: None = None,
        target: Callable[..., object] = _no_faults,
        name: str = "thread",
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._scheduler, self._before_start = scheduler, before_start
        self._work = partial(target, *args, **(kwargs or {}))
        self.name, self.daemon = name, daemon
        self.task: Task | None = None

    def start(self) -> None:
        """Start the task. Raises `RuntimeError` where the run has it that no thread can start."""
        self._before_start()
        self.task = self._scheduler.spawn(self.name, self._work)
        self.task.thread = self
        self._scheduler.pause()

    @property
    def ident(self) -> int | None:
        return None if self.task is None else self.task.number

    def is_alive(self) -> bool:
        return self.task is not None and not self.task.is_done

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else self._scheduler.clock.now + timeout
        self._scheduler.wait(lambda: not self.is_alive(), deadline, f"the end of {self.name}")


class SimulatedTimer(SimulatedThread):
    """A `threading.Timer`."""

    def __init__(
        self,
        scheduler: Scheduler,
        before_start: Callable[[], None],
        interval: float,
        function: Callable[..., object],
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(scheduler, before_start, None, self._run, "timer")
        self._interval, self._function = interval, partial(function, *args, **(kwargs or {}))
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True

    def _run(self) -> None:
        deadline = self._scheduler.clock.now + self._interval
        if not self._scheduler.wait(lambda: self._is_cancelled, deadline, "its time"):
            self._function()


class FutureThreading:
    """Stands for `threading` where futures name it: those of tasks let other tasks run, those of others are as ever."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    def Condition(self) -> Any:
        of_task = threading.current_thread().name == CARRIER_NAME
        return SimulatedCondition(self._scheduler) if of_task else threading.Condition()


class SimulatedPool:
    """A `concurrent.futures.ThreadPoolExecutor` of one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        max_workers: int,
        thread_name_prefix: str = "pool",
        initializer: Callable[[], object] = _no_faults,
    ) -> None:
        assert max_workers == 1
        self._initializer = initializer
        self._scheduler, self._items = scheduler, deque[Any]()
        self._is_closed = False
        self._task = scheduler.spawn(thread_name_prefix, self._run)

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._items.append((future, partial(work, *args)))
        self._scheduler.pause()
        return future

    def shutdown(self) -> None:
        self._is_closed = True
        self._scheduler.wait(lambda: self._task.is_done, None, "the end of a pool")

    def _run(self) -> None:
        self._initializer()
        while self._scheduler.wait(lambda: bool(self._items or self._is_closed), None, "work"):
            if not self._items:
                return
            future, work = self._items.popleft()
            try:
                result = work()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)


class SimulatedWait:
    """Stands for `concurrent.futures.wait`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def __call__(self, futures: Collection[Future[Any]], timeout: float | None = None) -> Any:
        deadline = None if timeout is None else self._scheduler.clock.now + timeout
        for future in futures:
            with suppress(TimeoutError, CancelledError):
                future.exception(None if deadline is None else max(deadline - self._scheduler.clock.now, 0.0))
        done = {future for future in futures if future.done()}
        return DoneAndNotDoneFutures(done, set(futures) - done)
