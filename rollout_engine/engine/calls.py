"""A call of a verb, the future of its result, and the calls that wait for a later step."""

import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from rollout_engine.engine.interrupts import allowed
from rollout_engine.engine.verb import Arguments, Verb


class CallFuture(Future[Any]):
    """The future of a call. A caller that no longer wants the result cancels it, at any time and on any thread.

    A cancelled call that has not begun never does; one that runs in pieces computes no more of them; the result of any
    other is dropped.
    """

    begun = False
    """Whether the call is known here to have begun."""

    def wait(self, verb: Verb, arguments: Arguments) -> Any:
        """Return the result of this call of a verb. After the verb's timeout, cancel the call and raise its error for a
        late call."""
        try:
            with allowed():
                return self.result(verb.patience(arguments))
        except TimeoutError:
            if self.done():  # it is the result
                raise
            self.cancel()
            raise verb.too_late(arguments, begun=self.begun) from None
        finally:
            self.cancel()  # interrupted, or too late: no caller waits for it any more

    def begin(self) -> bool:
        """Note that the call begins. Returns False if it is cancelled and must not begin."""
        self.begun = True  # before the check: a concurrent cancel must not report that it will never begin
        return not self.cancelled()

    def succeed(self, result: Any) -> None:
        """Set the result, unless the call is over or cancelled."""
        if not self.done() and self.set_running_or_notify_cancel():
            self.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Set the error, unless the call is over or cancelled."""
        if not self.done() and self.set_running_or_notify_cancel():
            self.set_exception(error)


class Call:
    """A call of a verb: its arguments, its client, and the future of its result."""

    __slots__ = ("arguments", "caller", "deadline", "future", "result", "start", "verb")

    def __init__(
        self,
        verb: Verb,
        arguments: Mapping[str, Any],
        future: CallFuture | None = None,
        *,
        caller: int = 0,
        deadline: float | None = None,
    ) -> None:
        """`caller` is a client's index. After `deadline` (`time.monotonic`) the call does not begin any more, and is
        not waited for. Raises `RequestError` for arguments of other types than the verb's."""
        self.verb, self.arguments = verb, verb.bind_arguments(arguments)
        self.future = CallFuture() if future is None else future
        self.caller, self.start = caller, time.perf_counter()
        self.deadline = deadline if verb.timeout else None
        self.result: Any = None
        """Return value of the verb's function, kept while the call waits for a later step."""

    @property
    def is_late(self) -> bool:
        """Whether its deadline is over."""
        return self.deadline is not None and time.monotonic() > self.deadline


class WaitingCalls:
    """Calls that end with a later step, or at their deadlines. A step costs the same however many of them wait.

    Only the driver uses it, inside its lock; a call may be cancelled on any thread, and by the garbage collector.
    """

    def __init__(self) -> None:
        self._by_verb: dict[str, dict[Call, None]] = {}
        self._by_deadline: list[tuple[float, int, Call]] = []
        """Calls with a deadline, the next one first."""
        self._cancelled: deque[Call] = deque()
        """Calls that were cancelled since the last look."""

    def __len__(self) -> int:
        return sum(map(len, self._by_verb.values()))

    def add(self, call: Call) -> None:
        """Add a call until it is over, too late or cancelled."""
        self._by_verb.setdefault(call.verb.name, {})[call] = None
        if call.deadline is not None:
            insort(self._by_deadline, (call.deadline, id(call), call))
        call.future.add_done_callback(lambda future: self._cancelled.append(call) if future.cancelled() else None)

    def pop(self, is_over: Callable[[Verb], bool]) -> list[Call]:
        """Remove and return the calls whose verb `is_over` now, and those that are too late."""
        while self._cancelled:
            self._remove(self._cancelled.popleft())
        first = [next(iter(calls)) for calls in self._by_verb.values()]
        found = [call for each in first if is_over(each.verb) for call in self._by_verb[each.verb.name]]
        now = time.monotonic()
        for deadline, _, call in self._by_deadline:
            if deadline >= now:
                break
            found.append(call)
        found = list(dict.fromkeys(found))
        for call in found:
            self._remove(call)
        return found

    def _remove(self, call: Call) -> None:
        calls = self._by_verb.get(call.verb.name, {})
        if call not in calls:
            return
        del calls[call]
        if not calls:
            del self._by_verb[call.verb.name]
        if call.deadline is not None:
            del self._by_deadline[bisect_left(self._by_deadline, (call.deadline, id(call)))]


def copy_outcome(source: Future[Any], target: CallFuture) -> None:
    """Give a call the result or the error of another future."""
    error = source.exception()
    if error is None:
        target.succeed(source.result())
    else:
        target.fail(error)
