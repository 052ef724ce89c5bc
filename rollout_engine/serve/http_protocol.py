"""uvicorn's HTTP/1.1 protocol with bounds on what comes before a request is known: size and time of its header."""

import asyncio
from typing import Any

_MAX_HEADER_BYTES = 64 << 10
_HEADER_SECONDS = 30.0


def limited_protocol() -> type[Any]:
    """The protocol's class. Raises `ImportError` without the extra `server`."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class LimitedProtocol(HttpToolsProtocol):
        """Closes connections whose header is too long, or does not come."""

        _num_bytes = 0
        """Received since the last header was complete, while none is."""
        _has_header = False
        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait_for_header()

        def data_received(self, data: bytes) -> None:
            if not self._has_header:
                self._num_bytes += len(data)
                if self._num_bytes > _MAX_HEADER_BYTES and b"\r\n\r\n" not in data:
                    self._refuse(b"431 Request Header Fields Too Large")
                    return
            super().data_received(data)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._has_header = False
            if self._header_timer is None:
                self._wait_for_header()

        def on_headers_complete(self) -> None:
            self._has_header, self._num_bytes = True, 0
            self._stop_waiting()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._has_header = False

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait_for_header(self) -> None:
            self._header_timer = self.loop.call_later(_HEADER_SECONDS, self._refuse, b"408 Request Timeout")

        def _stop_waiting(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _refuse(self, status: bytes) -> None:
            self._header_timer = None
            if not self.transport.is_closing():
                self.transport.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
                self.transport.close()

    return LimitedProtocol
