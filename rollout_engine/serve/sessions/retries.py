"""Requests of a session that are sent again: one answer for all copies, sampled once.

    first copy ──> Answer (a task of its own) ──> handler ──> engine
    others     ──> the same Answer, also for some seconds after its end

An answer is cancelled once no copy waits for it: its clients have left. One that failed is not kept. The memory of
answers counts in that of their session, and those that have ended take a small part of it at most.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from msgspec import structs

from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Events, Reply
from rollout_engine.sessions.memory import Memory, bytes_of_value
from rollout_engine.sessions.messages import Key

_MAX_KEPT = 16
"""Ended answers that are kept for a session."""
_SHARE = 8
"""They take an eighth of the session's memory at most."""


class Answer:
    """One answer, whole or as events, and the number of requests that wait for it."""

    def __init__(self, make: Callable[[], Awaitable[Reply | Events]], memory: Memory) -> None:
        """`memory`: counts the answer as long as it may be read."""
        self.waiters, self.num_bytes = 0, 0
        self.is_forgotten = False
        """Whether no further copy gets it."""
        self._memory = memory
        self.ended_at: float | None = None
        """When it was complete; None: it runs, or it failed."""
        self._reply: Reply | Events | None = None
        self._events: list[Any] = []
        self._readers: list[asyncio.Future[None]] = []
        self.task = asyncio.ensure_future(self._run(make))
        self.task.add_done_callback(self._end)

    @property
    def has_failed(self) -> bool:
        """Whether no more copies of the request may have it."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    async def _run(self, make: Callable[[], Awaitable[Reply | Events]]) -> None:
        self._reply = await make()
        del make  # it holds the request
        if not isinstance(self._reply, Events):
            self._count(self._reply.body)
            return
        self._wake_readers()
        async for event in self._reply.events:
            self._events.append(event)
            self._count(event)
            self._wake_readers()

    def _end(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            task.exception()  # else asyncio logs it, if all readers have left
        self._wake_readers()
        self.release()

    def _count(self, value: Any) -> None:
        size = bytes_of_value(value)
        self.num_bytes += size
        self._memory.add(size)

    def release(self) -> None:
        """Count it no more, if it has ended and neither a copy nor a reader will have it."""
        if self.is_forgotten and self.task.done() and not self.waiters:
            self._memory.add(-self.num_bytes)
            self.num_bytes = 0

    def _wake_readers(self) -> None:
        for reader in self._readers:
            if not reader.done():
                reader.set_result(None)
        self._readers.clear()

    async def read(self) -> Reply | Events:
        """The response. Raises the error of the handler."""
        while self._reply is None and not self.task.done():
            await self._wait()
        if self._reply is None:
            self._raise()
        if isinstance(self._reply, Events):
            return structs.replace(self._reply, events=self._read_events())
        while not self.task.done():
            await self._wait()
        self._raise()
        assert self._reply is not None, "it has been made"
        return self._reply

    async def _read_events(self) -> AsyncIterator[Any]:
        index = 0
        while True:
            while index < len(self._events):
                yield self._events[index]
                index += 1
            if self.task.done():
                self._raise()
                return
            await self._wait()

    async def _wait(self) -> None:
        """Wait for the next event, or the end."""
        reader = asyncio.get_running_loop().create_future()
        self._readers.append(reader)
        await reader

    def _raise(self) -> None:
        if self.task.cancelled():
            raise HttpProblem(404, "The session was deleted while this request ran.")
        self.task.result()


class Retries:
    """The answers of one session by the digests of their requests."""

    def __init__(self, seconds: float, memory: Memory | None = None) -> None:
        """`seconds`: how long an answer is kept after its end. `memory`: the session's; None: it does not matter."""
        self._seconds = seconds
        self._memory = Memory.without_bound() if memory is None else memory
        self._answers: dict[Key, Answer] = {}
        self._running: set[Answer] = set()
        """Answers that have not ended, also those that no copy gets any more."""

    def join(
        self, key: Key, make: Callable[[], Awaitable[Reply | Events]], now: float, *, is_new: bool = False
    ) -> Answer:
        """The answer of an earlier copy of a request, or a new one, which `make` begins. `leave` it afterwards.

        `is_new`: the request is no copy, though it may be equal to another; later copies get its answer.
        """
        self.forget_late(now)
        found = self._answers.get(key)
        if found is None or found.has_failed or is_new:
            self._forget(key)  # the order of the answers is that of their requests
            found = self._answers[key] = Answer(make, self._memory)
            self._running.add(found)
            found.task.add_done_callback(lambda _: self._running.discard(found))
        found.waiters += 1
        return found

    def leave(self, key: Key, answer: Answer, now: float) -> None:
        """A request has its answer, or its client has left."""
        answer.waiters -= 1
        is_over = answer.has_failed
        if not answer.task.done() and not answer.waiters:
            answer.task.cancel()
            is_over = True
        if is_over and self._answers.get(key) is answer:
            self._forget(key)
        elif answer.task.done() and answer.ended_at is None:
            answer.ended_at = now
            self.forget_late(now)
        answer.release()

    def forget_late(self, now: float) -> None:
        """Forget answers that ended long ago, and the oldest of too many, or of those that take too much memory."""
        ended = [(key, each, each.ended_at) for key, each in self._answers.items() if each.ended_at is not None]
        num_surplus, most = len(ended) - _MAX_KEPT, self._memory.share(_SHARE)
        num_bytes = sum(each.num_bytes for _, each, _ in ended)
        for index, (key, answer, ended_at) in enumerate(ended):
            if index < num_surplus or num_bytes > most or ended_at + self._seconds <= now:
                num_bytes -= answer.num_bytes
                self._forget(key)

    def _forget(self, key: Key) -> None:
        if (answer := self._answers.pop(key, None)) is not None:
            answer.is_forgotten = True
            answer.release()

    def close(self) -> None:
        """Cancel all that runs and forget the rest."""
        for answer in self._running:
            answer.task.cancel()
        for key in [*self._answers]:
            self._forget(key)

    def __len__(self) -> int:
        return len(self._running.union(self._answers.values()))
