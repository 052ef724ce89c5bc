"""HTTP/1.1 on a connection, for uvicorn's server: requests are parsed by httptools, and answered one after the other.

Size and time of a header are bounded. Malformed requests are refused in the shape of every other error. Once a client
has left, all of its requests are notified. A client that has only closed its sending side is answered.
"""

import asyncio
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import msgspec

from rollout_engine.serve.http_exchange import HttpExchange, Message
from rollout_engine.serve.problems import HttpProblem, problem_body

_MAX_HEADER_BYTES = 64 << 10
_MAX_WAITING_BYTES = 64 << 10
"""Bytes of bodies that no handler has received yet: more is left in the socket."""
_MAX_WAITING_REQUESTS = 16
"""Requests behind the one that is answered. With room for more, it is noticed that their client leaves."""
_HEADER_SECONDS = 30.0
_KEEP_ALIVE_SECONDS = 75.0
_LINGER_SECONDS = 2.0
"""Seconds that a refused client may continue to send. Closed at once, its machine might drop the answer unread."""
_PROBE_SECONDS = 0.05
"""Seconds from the end of a client's sending to the second check that it reads; later ones wait twice as long."""
_VERSIONS = {"asgi": {"version": "3.0", "spec_version": "2.3"}}


def connections_of(max_connections: int) -> type["HttpConnection"]:
    """The class of the connections of one server.

    One that is made while `max_connections` are open gets one answer, by which the application refuses it. Raises
    `ImportError` if the package httptools, of the extra `server`, is not installed.
    """
    import httptools

    attributes = {"__slots__": (), "max_connections": max_connections, "httptools": httptools}
    return type("Connection", (HttpConnection,), attributes)


class HttpConnection(asyncio.Protocol):
    """One connection, as uvicorn makes it."""

    max_connections: int
    httptools: Any
    """The package that parses requests."""
    __slots__ = (
        *("_answering", "_app", "_arriving", "_expects_continue", "_has_header", "_headers", "_is_in_header"),
        *("_is_lingering", "_is_paused", "_is_surplus", "_loop", "_num_bytes", "_parser", "_timer", "_url"),
        *("_waiting", "_written"),
        *("connections", "tasks", "transport"),
    )

    def __init__(
        self, config: Any, server_state: Any, app_state: Any, _loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._app, self._loop = config.loaded_app, _loop or asyncio.get_running_loop()
        self.connections: set[HttpConnection] = server_state.connections
        self.tasks: set[asyncio.Task[None]] = server_state.tasks
        self._parser: Any = self.httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._url, self._headers = b"", list[tuple[bytes, bytes]]()
        self._expects_continue = self._is_paused = self._is_lingering = False
        """Whether the client waits for leave to send its body; whether it is not read from; whether it has its last
        answer, and its further bytes are dropped."""
        self._has_header = self._is_in_header = False
        """Whether a request's header is complete and its body is not; whether a header has begun."""
        self._num_bytes = 0
        """Received since the last header was complete, while none is."""
        self._timer: asyncio.TimerHandle | None = None
        """Ends a connection whose header does not arrive, or that is idle."""
        self._arriving: HttpExchange | None = None
        self._answering: HttpExchange | None = None
        self._waiting: list[tuple[HttpExchange, Message]] = []
        """The last request that has arrived; the one that is answered; those between them, in their order."""
        self._written: asyncio.Future[None] | None = None
        """Done once more can be written; None while it can."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.connections.add(self)
        self._is_surplus = len(self.connections) > self.max_connections
        self._wait_for_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.discard(self)
        self._stop_timer()
        self.resume_writing()
        self._leave()
        self._parser = self._arriving = self._answering = None  # each refers to this connection

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        if not self._has_header:
            self._num_bytes += len(data)
            if self._num_bytes > _MAX_HEADER_BYTES and b"\r\n\r\n" not in data:
                self._refuse(431, f"The header is longer than {_MAX_HEADER_BYTES} bytes.")
                return
        try:
            self._parser.feed_data(data)
        except self.httptools.HttpParserUpgrade:
            # The client asked for another protocol, and bytes after its request are not parsed: answer, and close.
            assert self._arriving is not None, "its request is complete"
            self._arriving.keep_alive = False
        except self.httptools.HttpParserError:
            self._refuse(400, "Invalid HTTP request received.")
        if self._is_in_header and self._timer is None:
            self._wait_for_header()

    def eof_received(self) -> bool:
        """asyncio: the client sends nothing more. Returns whether it is answered, since it may still read.

        The end of a connection looks the same until something is written: then the client's machine resets it.
        """
        self.shutdown()
        if self._answering is None or self._has_header or self._is_in_header:
            return False
        self._probe(_PROBE_SECONDS)
        return True

    def on_message_begin(self) -> None:
        """httptools: a request begins."""
        self._url, self._headers, self._expects_continue = b"", [], False
        self._has_header, self._is_in_header = False, True
        if self._arriving is not None:
            self._stop_timer()  # of an idle connection; that of the first header continues

    def on_url(self, url: bytes) -> None:
        """httptools: a part of the target of the request."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: one field of the header."""
        name = name.lower()
        self._headers.append((name, value))
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True

    def on_headers_complete(self) -> None:
        """httptools: the header is complete. Has the request answered, or wait for its turn."""
        self._has_header, self._is_in_header, self._num_bytes = True, False, 0
        self._stop_timer()
        parser, url = self._parser, self.httptools.parse_url(self._url)
        method, version, path = parser.get_method().decode("ascii"), parser.get_http_version(), url.path.decode("ascii")
        scope: Message = {
            "type": "http",
            **_VERSIONS,
            "http_version": version,
            "method": method,
            "path": unquote(path) if "%" in path else path,
            "query_string": url.query or b"",
            "headers": self._headers,
        }
        self._arriving = exchange = HttpExchange(
            self,
            method,
            version,
            keep_alive=parser.should_keep_alive() and not self._is_surplus,
            expects_continue=self._expects_continue,
        )
        exchange.is_surplus = self._is_surplus
        if self._answering is None:
            self._answering = exchange
            exchange.start(self._app, scope)
        else:
            self._waiting.append((exchange, scope))
            if len(self._waiting) >= _MAX_WAITING_REQUESTS:
                self._pause_reading()

    def on_body(self, body: bytes) -> None:
        """httptools: a part of the body."""
        assert self._arriving is not None, "its header is complete"
        num_waiting = self._arriving.add_body(body)
        if self._waiting:
            num_waiting = sum(exchange.num_waiting_bytes for exchange, _ in self._waiting)
        if num_waiting > _MAX_WAITING_BYTES:
            self._pause_reading()

    def on_message_complete(self) -> None:
        """httptools: the request is complete."""
        assert self._arriving is not None, "its header is complete"
        self._has_header = False
        self._arriving.end_body()

    def finish_answer(self) -> None:
        """Answer the next request, or wait for it."""
        self._answering = None
        if self.transport.is_closing() or self._is_lingering:
            return
        self.resume_reading()
        if self._waiting:
            self._answering, scope = self._waiting.pop(0)
            self._answering.start(self._app, scope)
        elif self._timer is None and not self._is_in_header:
            self._timer = self._loop.call_later(_KEEP_ALIVE_SECONDS, self.transport.close)

    def close_after(self, *, has_body: bool) -> None:
        """Close the connection behind an answer. `has_body`: whether all of its request has arrived."""
        if has_body:
            self.transport.close()
        elif not self._is_lingering:
            self._is_lingering = True
            self._stop_timer()
            self._waiting.clear()
            self.transport.write_eof()
            self.resume_reading()
            self._timer = self._loop.call_later(_LINGER_SECONDS, self.transport.close)

    def shutdown(self) -> None:
        """uvicorn: close once the requests that have arrived are answered."""
        if self._answering is None:
            self.transport.close()
        else:
            (self._waiting[-1][0] if self._waiting else self._answering).keep_alive = False

    @property
    def is_full(self) -> bool:
        """Whether the client reads too slowly for more to be written now."""
        return self._written is not None

    async def wait_until_written(self) -> None:
        """Wait until more can be written, or the client has left."""
        if self._written is not None:
            await asyncio.shield(self._written)

    def pause_writing(self) -> None:
        """The transport holds much that the client has not read."""
        self._written = self._loop.create_future()

    def resume_writing(self) -> None:
        """It holds less."""
        written, self._written = self._written, None
        if written is not None and not written.done():
            written.set_result(None)

    def resume_reading(self) -> None:
        """Continue to receive a request."""
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()

    def _pause_reading(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def _probe(self, seconds: float) -> None:
        if self._answering is not None and self._answering.probe():
            self._timer = self._loop.call_later(seconds, self._probe, 2 * seconds)

    def _leave(self) -> None:
        self._waiting.clear()
        if self._answering is not None:
            self._answering.disconnect()

    def _wait_for_header(self) -> None:
        message = f"The header did not come within {_HEADER_SECONDS:g} seconds."
        self._timer = self._loop.call_later(_HEADER_SECONDS, self._refuse, 408, message)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Close the connection, with an error unless an answer is half written."""
        self._stop_timer()
        if not self.transport.is_closing():
            if self._answering is None or not self._answering.has_begun:
                self.transport.write(_refusal(status, message))
            self.close_after(has_body=False)
        self._leave()


def _refusal(status: int, message: str) -> bytes:
    body = msgspec.json.encode(problem_body(HttpProblem(status, message), "openai"))
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
