"""uvicorn's HTTP/1.1 protocol with bounds on what comes before a request is known: size and time of its header.

What is no request is refused in the shape of every other error. Once a client has left, all of its requests know it.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec

from rollout_engine.serve.problems import HttpProblem, problem_body

_MAX_HEADER_BYTES = 64 << 10
_HEADER_SECONDS = 30.0
_CONTINUE = b"HTTP/1.1 100 "
TRANSPORT = "rollout_engine.transport"
"""Name of the ASGI extension by which an application finds the `CycleTransport` of a request."""
_Protocol: Any = object
"""uvicorn's, which is optional: `limited_protocol` puts it there."""


def limited_protocol(max_connections: int) -> type[Any]:
    """The protocol's class. Raises `ImportError` without the extra `server`.

    A connection that comes while `max_connections` are open gets one answer, by which the application refuses it.
    """
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    return type("LimitedProtocol", (_Limits, HttpToolsProtocol), {"_max_connections": max_connections})


class _Limits(_Protocol):  # type: ignore[misc]
    """Closes connections whose header is too long, or does not come, and those beyond the most that may be open."""

    __slots__ = (
        *("_answering", "_has_header", "_header_timer", "_is_in_header", "_is_surplus", "_num_bytes"),
        "pipeline",  # of uvicorn's
    )
    _max_connections: int

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.pipeline = _Pipeline()
        self._is_surplus = len(self.connections) > self._max_connections
        """Whether this connection came while the most were open."""
        self._num_bytes = 0
        """Received since the last header was complete, while none is."""
        self._has_header = self._is_in_header = False
        """Whether a request's header is complete and its body is not; whether a header has begun."""
        self._header_timer: asyncio.TimerHandle | None = None
        self._answering: Any = None
        """The request that is being answered: `cycle` is the last one that has come, behind which others may wait."""
        self._wait_for_header()

    def data_received(self, data: bytes) -> None:
        if not self._has_header:
            self._num_bytes += len(data)
            if self._num_bytes > _MAX_HEADER_BYTES and b"\r\n\r\n" not in data:
                self._refuse(431, f"The header is longer than {_MAX_HEADER_BYTES} bytes.")
                return
        super().data_received(data)
        if self._is_in_header and self._header_timer is None:
            self._wait_for_header()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_header, self._is_in_header = False, True

    def on_headers_complete(self) -> None:
        self._has_header, self._is_in_header, self._num_bytes = True, False, 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._has_header = False
        if self.cycle is self._answering:
            self.cycle.transport.has_body = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._unset_keepalive_if_required()  # uvicorn's own timer, which would keep a connection that was reset
        super().connection_lost(exc)
        self._leave()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answering = cycle
        cycle.transport = CycleTransport(self.transport, cycle.scope["method"], has_body=not cycle.more_body)
        if self._is_surplus:
            cycle.transport.is_surplus, cycle.keep_alive = True, False
        cycle.scope["extensions"] = {TRANSPORT: cycle.transport}
        super()._start_asgi_task(cycle, app)

    def _unsupported_upgrade_warning(self) -> None:
        """The client asked for another protocol, and what follows its request is not parsed: answer, and close."""
        self.cycle.keep_alive = False

    def _leave(self) -> None:
        self.pipeline.clear()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
            self._answering.transport.leave()

    def _wait_for_header(self) -> None:
        message = f"The header did not come within {_HEADER_SECONDS:g} seconds."
        self._header_timer = self.loop.call_later(_HEADER_SECONDS, self._refuse, 408, message)

    def _stop_waiting(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Close the connection, with an error unless an answer is half written."""
        self._stop_waiting()
        current = self._answering
        is_between = current is None or current.response_complete or not current.response_started
        if not self.transport.is_closing():
            if is_between:
                self.transport.write(_refusal(status, message))
            self.transport.close()
        self._leave()


class _Pipeline(list[Any]):
    """Requests behind the one that is answered, the next one last: as much of a deque as uvicorn calls.

    An empty deque takes 700 bytes of each connection.
    """

    def appendleft(self, item: Any) -> None:
        self.insert(0, item)


class CycleTransport:
    """The transport of one request. It sends the head of a response together with the first part of its body."""

    __slots__ = ("_has_head", "_head", "_transport", "close", "has_body", "is_closing", "is_surplus", "leave")

    def __init__(self, transport: asyncio.Transport, method: str, *, has_body: bool) -> None:
        self._transport, self._head = transport, b""
        self._has_head = method == "HEAD"  # which has no body
        self.close, self.is_closing = transport.close, transport.is_closing
        self.has_body = has_body
        """Whether all of the request's body has come, so that reading it waits for nothing."""
        self.is_surplus = False
        """Whether the request is to be refused: its connection came while the most were open."""
        self.leave: Callable[[], object] = _ignore
        """Called once the client has left before its answer was complete."""

    def call_on_leave(self, leave: Callable[[], object]) -> Callable[[], None]:
        """Have `leave` called once the client has left before its answer is complete. Returns what ends that."""
        self.leave = leave
        return self._forget_leave

    def _forget_leave(self) -> None:
        self.leave = _ignore

    def write(self, data: bytes) -> None:
        """Send, or keep what is a head."""
        if self._head:
            data, self._head = self._head + data, b""
        elif not self._has_head and not data.startswith(_CONTINUE):
            self._head, self._has_head = data, True
            return
        self._transport.write(data)


def _ignore() -> None: ...


def _refusal(status: int, message: str) -> bytes:
    body = msgspec.json.encode(problem_body(HttpProblem(status, message), "openai"))
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
