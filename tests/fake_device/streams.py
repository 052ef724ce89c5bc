"""Streams of the fake device: queues of operations that run late, in any order that events and waits allow."""

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Literal

Clock = dict[str, int]
"""By stream, the number of its last operation that is known to have come before."""
HOST = "host"
Order = Literal["random", "lazy", "eager"]
"""When operations run: at random moments, not before somebody waits for them, or when they are launched."""


class Operation:
    """Work on a stream, or an access by the host."""

    def __init__(self, name: str, stream: str, number: int, clock: Clock, tick: float) -> None:
        self.name, self.stream, self.number, self.clock, self.tick = name, stream, number, clock, tick
        self.run: Callable[[], None] = lambda: None
        self.index = 0
        """Its place among all accesses, once it has one."""

    def follows(self, other: "Operation") -> bool:
        """Whether `other` is known to come before this."""
        return other is self or other.number <= self.clock.get(other.stream, 0)

    def __str__(self) -> str:
        return f"{self.name} ({self.stream} #{self.number})"


def join(clock: Clock, other: Clock) -> None:
    """Learn what `other` knows."""
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


class Stream:
    """One queue. `clock` is known to come before whatever is launched next."""

    def __init__(self, name: str) -> None:
        self.name, self.clock = name, Clock()
        self.count = self.num_done = 0
        self.queue: deque[Operation] = deque()


class Timeline:
    """All streams, what the host knows of them, and who runs next."""

    def __init__(self, seed: int, order: Order) -> None:
        self._random, self.order = random.Random(seed), order
        self.streams: dict[str, Stream] = {}
        self.host = Clock()
        self.accesses: list[Operation] = [Operation("nothing", HOST, 0, {}, 0)]
        self.lock = threading.RLock()
        self._problem: BaseException | None = None

    def new_stream(self, name: str) -> Stream:
        """A stream of its own name."""
        made = self.streams[name] = Stream(name)
        return made

    def launch(self, stream: Stream, name: str, run: Callable[[Operation], None], tick: float) -> Operation:
        """Queue `run`; it knows all that the stream and the host know."""
        stream.count += 1
        join(stream.clock, self.host)
        stream.clock[stream.name] = stream.count
        operation = Operation(name, stream.name, stream.count, dict(stream.clock), tick)
        operation.run = lambda: run(operation)
        stream.queue.append(operation)
        if self.order == "eager":
            self.finish({stream.name: stream.count})
        elif self.order == "random":
            self.advance()
        return operation

    def touch(self, name: str, tick: float) -> Operation:
        """An access by the host, now."""
        self.host[HOST] = self.host.get(HOST, 0) + 1
        return Operation(name, HOST, self.host[HOST], dict(self.host), tick)

    def advance(self) -> None:
        """Run some operations that may run."""
        while self._random.random() < 0.5:
            ready = [stream for stream in self.streams.values() if stream.queue and self._is_ready(stream.queue[0])]
            if not ready:
                return
            self._step(self._random.choice(ready))

    def finish(self, clock: Clock) -> None:
        """Run what is before `clock`, and perhaps more; raises the first error of an operation."""
        while waiting := [name for name, number in clock.items() if name != HOST and self._done(name) < number]:
            stream = self.streams[self._random.choice(waiting)]
            head = stream.queue[0]
            if self._is_ready(head):
                self._step(stream)
            else:
                self.finish({name: number for name, number in head.clock.items() if name != stream.name})
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise RuntimeError(f"an operation failed on the fake device: {problem!r}") from problem

    def is_over(self, clock: Clock) -> bool:
        """Whether all before `clock` has run."""
        return all(self._done(name) >= number for name, number in clock.items() if name != HOST)

    def everything(self) -> Clock:
        """A clock after all that was launched."""
        return {stream.name: stream.count for stream in self.streams.values()}

    def wait(self, clock: Clock) -> None:
        """Have the host wait for `clock`."""
        self.finish(clock)
        join(self.host, clock)

    def _done(self, name: str) -> int:
        return self.streams[name].num_done

    def _is_ready(self, operation: Operation) -> bool:
        own = operation.stream
        return all(self._done(name) >= number for name, number in operation.clock.items() if name not in (HOST, own))

    def _step(self, stream: Stream) -> None:
        operation = stream.queue.popleft()
        try:
            operation.run()
        except Exception as problem:
            self._problem = self._problem or problem
        stream.num_done += 1
