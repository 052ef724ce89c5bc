"""One HTTP/1.1 request of a connection and its answer, as an ASGI application sees them."""

import asyncio
import logging
from collections.abc import Callable, MutableMapping
from http import HTTPStatus
from typing import Any, Protocol

Message = MutableMapping[str, Any]
EXCHANGE = "rollout_engine.exchange"
"""Name of the ASGI extension by which an application finds the `HttpExchange` of a request."""
_STATUS_LINES = {int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n".encode() for status in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
logger = logging.getLogger("rollout_engine.serve")


class Connection(Protocol):
    """The part of a connection that an exchange needs."""

    transport: asyncio.Transport
    tasks: set["asyncio.Task[None]"]

    @property
    def is_full(self) -> bool:
        """Whether the client reads too slowly for more to be written now."""

    async def wait_until_written(self) -> None:
        """Wait until more can be written, or the client has left."""

    def resume_reading(self) -> None:
        """Continue to receive the request's body."""

    def finish_answer(self) -> None:
        """Continue with the next request: the answer is complete."""

    def close_after(self, *, has_body: bool) -> None:
        """Close the connection behind an answer. `has_body`: whether all of its request has arrived."""


class HttpExchange:
    """A request, whose body arrives while it is answered, and its answer."""

    __slots__ = (
        *("_body", "_connection", "_expects_continue", "_head", "_is_chunked", "_is_head", "_is_read"),
        *("_takes_chunks", "_waiter"),
        *("has_begun", "has_body", "is_complete", "is_gone", "is_surplus", "keep_alive", "leave"),
    )

    def __init__(
        self, connection: Connection, method: str, version: str, *, keep_alive: bool, expects_continue: bool
    ) -> None:
        self._connection, self._is_head, self._expects_continue = connection, method == "HEAD", expects_continue
        self._takes_chunks = version != "1.0"
        self.keep_alive = keep_alive and self._takes_chunks
        """Whether the connection stays open behind the answer."""
        self._body, self._head = b"", b""
        """The part of the body that has arrived and was not received; the head of the answer until it is sent."""
        self._is_chunked = self._is_read = False
        """Whether the answer is in chunks; whether the end of the body was received."""
        self._waiter: asyncio.Future[None] | None = None
        self.has_body = self.has_begun = self.is_complete = self.is_gone = self.is_surplus = False
        """Whether all of the body has arrived, so that reading it waits for nothing; whether the answer has begun, and
        is complete; whether the client has left; whether the request is refused: too many connections are open."""
        self.leave: Callable[[], object] = _ignore
        """Called once the client has left before its answer was complete."""

    def start(self, app: Any, scope: Message) -> None:
        """Have the application answer, in a task."""
        scope["extensions"] = {EXCHANGE: self}
        task = asyncio.get_running_loop().create_task(app(scope, self.receive, self.send))
        self._connection.tasks.add(task)
        task.add_done_callback(self._end)

    def call_on_leave(self, leave: Callable[[], object]) -> Callable[[], None]:
        """Have `leave` called once the client has left before its answer is complete. Returns how to undo it."""
        self.leave = leave
        return self._forget_leave

    def add_body(self, data: bytes) -> int:
        """Take more of the body. Returns how many bytes of it wait to be received."""
        if not self.is_complete:
            self._body += data
            self._wake()
        return len(self._body)

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of the body that wait to be received."""
        return len(self._body)

    def end_body(self) -> None:
        """Record that the body is complete."""
        self.has_body = True
        self._wake()

    def disconnect(self) -> None:
        """Record that the client has left, and call `leave`."""
        if not self.is_complete and not self.is_gone:
            self.is_gone = True
            self._wake()
            self.leave()

    def probe(self) -> bool:
        """Write an interim response, which fails once the client has left. Returns False if none may be written:
        the answer itself has begun, or the client speaks HTTP/1.0."""
        may_write = self._takes_chunks and not self.has_begun
        if may_write:
            self._connection.transport.write(_CONTINUE)
        return may_write

    def take_body(self) -> bytes:
        """Take the part of the body that has arrived, all of it if `has_body`."""
        body, self._body, self._is_read = self._body, b"", self.has_body
        if self.has_body:  # a large one had reading stopped, and nothing else would notice that the client leaves
            self._connection.resume_reading()
        return body

    async def receive(self) -> Message:
        """ASGI: the next part of the body, or that the client has left or has its answer."""
        if self._expects_continue and not self.has_begun:
            self._connection.transport.write(_CONTINUE)
        self._expects_continue = False
        while not (self._body or (self.has_body and not self._is_read) or self.is_gone or self.is_complete):
            self._connection.resume_reading()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.is_gone or self.is_complete:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self.take_body(), "more_body": not self.has_body}

    async def send(self, message: Message) -> None:
        """ASGI: the head of the answer, which goes out with the first part of its body; or a part of that."""
        connection = self._connection
        if connection.is_full and not self.is_gone:
            await connection.wait_until_written()
        if self.is_gone:
            return
        if message["type"] == "http.response.start":
            self._head, self.has_begun = self._head_of(message["status"], message["headers"]), True
            return
        data, is_last = message.get("body", b""), not message.get("more_body", False)
        if self._is_head:
            data = b""
        elif self._is_chunked:
            data = (b"%x\r\n%b\r\n" % (len(data), data) if data else b"") + (b"0\r\n\r\n" if is_last else b"")
        connection.transport.writelines((self._head, data) if self._head else (data,))
        self._head = b""
        if is_last:
            self.is_complete, self._body = True, b""
            self._wake()
            if not self.keep_alive:
                connection.close_after(has_body=self.has_body)
            connection.finish_answer()

    def _head_of(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        fields = dict(headers)
        self.keep_alive = self.keep_alive and fields.get(b"connection") != b"close"
        self._is_chunked = self._takes_chunks and b"content-length" not in fields
        if not self.keep_alive:
            fields[b"connection"] = b"close"
        if self._is_chunked:
            fields[b"transfer-encoding"] = b"chunked"
        lines = b"".join([b"%b: %b\r\n" % field for field in fields.items()])
        head = b"%b%b\r\n" % (_STATUS_LINES[status], lines)
        if head.count(b"\n") != len(fields) + 2:
            raise ValueError(f"a header of the answer has a line break: {headers}")
        return head

    def _end(self, task: "asyncio.Task[None]") -> None:
        """Leave no client without an answer, whatever became of the application's task."""
        self._connection.tasks.discard(task)
        problem = None if task.cancelled() else task.exception()
        if problem is not None:
            logger.error("the application failed", exc_info=problem)
        if not (self.is_complete or self.is_gone):
            self._connection.transport.close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _forget_leave(self) -> None:
        self.leave = _ignore


def _ignore() -> None: ...
