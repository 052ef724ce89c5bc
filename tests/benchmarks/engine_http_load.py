"""Clients of an HTTP server, as a worker runs them: requests over many connections, as fast as answers come."""

import asyncio
import json
import resource
import time
from typing import Any

import uvloop


class Engine:
    """The clients, in one event loop."""

    def __init__(self, directory: str, dtype: str) -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._loop = uvloop.new_event_loop()
        self._held: list[asyncio.BaseTransport] = []

    def send(self, address: list[Any], path: str, bodies: list[Any], num_connections: int) -> dict[str, Any]:
        """Send every body once, each connection its next one when the last is answered.

        Seconds from the first byte out to the last answer, CPU seconds of this process in them, for each request the
        seconds to the first byte of its answer, and the bytes that came.
        """
        return self._loop.run_until_complete(self._send(address, path, bodies, num_connections))

    def hold(self, address: list[Any], path: str, body: Any, num_connections: int) -> int:
        """Open so many streams, and leave them open once each has begun. Bytes that came."""
        return self._loop.run_until_complete(self._hold(address, path, body, num_connections))

    def release(self) -> None:
        """Close what is held."""
        for transport in self._held:
            transport.close()
        self._held.clear()
        self._loop.run_until_complete(asyncio.sleep(0))

    async def _send(self, address: list[Any], path: str, bodies: list[Any], num_connections: int) -> dict[str, Any]:
        load = _Load([_request(path, body) for body in reversed(bodies)], num_connections)
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(num_connections):
            await self._loop.create_connection(lambda: _Connection(load), *address)
        await load.ended.wait()
        if load.failed:
            raise RuntimeError(f"a request failed: {load.failed}")
        return {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu_start,
            "first_bytes": load.first_bytes,
            "num_bytes": load.num_bytes,
        }

    async def _hold(self, address: list[Any], path: str, body: Any, num_connections: int) -> int:
        request, num_bytes = _request(path, body), 0
        for _ in range(num_connections):
            transport, stream = await self._loop.create_connection(_Stream, *address)
            transport.write(request)
            self._held.append(transport)
            num_bytes += await stream.begun
        return num_bytes


def _request(path: str, body: Any) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


class _Stream(asyncio.Protocol):
    """A stream that is read, and asked for nothing more."""

    def __init__(self) -> None:
        self.begun: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._seen = b""

    def data_received(self, data: bytes) -> None:
        if self.begun.done():
            return
        self._seen += data
        if b"data: " in self._seen:
            self.begun.set_result(len(self._seen))
        elif not self._seen.startswith(b"HTTP/1.1 200"[: len(self._seen)]):
            self.begun.set_exception(RuntimeError(f"a stream failed: {self._seen[:500]!r}"))

    def connection_lost(self, problem: Exception | None) -> None:
        if not self.begun.done():
            self.begun.set_exception(RuntimeError(f"a stream was closed: {self._seen[:500]!r}"))


class _Connection(asyncio.Protocol):
    """One connection: the next request goes out once the answer to the last one is complete."""

    def __init__(self, load: "_Load") -> None:
        self._load, self._start, self._end = load, b"", b""
        """First part of the answer, and its last five bytes so far."""
        self._num_bytes, self._num_expected = 0, -1
        """Bytes of the answer so far, and in all; -1: not known, the answer ends with an empty chunk."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        if not self._start:
            self._load.first_bytes.append(time.perf_counter() - self._sent)
            self._start, self._num_bytes, self._num_expected = data, 0, _num_bytes(data)
        self._num_bytes += len(data)
        self._end = (self._end + data[-5:])[-5:]
        if self._num_bytes == self._num_expected or (self._num_expected < 0 and self._end == b"0\r\n\r\n"):
            self._load.num_bytes += self._num_bytes
            if not self._start.startswith(b"HTTP/1.1 200"):
                self._load.failed = self._start[:500].decode(errors="replace")
            self._start = b""
            self._send()

    def _send(self) -> None:
        if not self._load.requests or self._load.failed:
            self._transport.close()
            self._load.closed()
            return
        self._sent = time.perf_counter()
        self._transport.write(self._load.requests.pop())


def _num_bytes(start: bytes) -> int:
    """Bytes of an answer whose first part, with the whole head in it, has come; -1: it is in chunks."""
    head, _, _ = start.partition(b"\r\n\r\n")
    _, found, length = head.partition(b"content-length: ")
    return len(head) + 4 + int(length.partition(b"\r\n")[0]) if found else -1


class _Load:
    def __init__(self, requests: list[bytes], num_connections: int) -> None:
        self.requests, self._num_left = requests, num_connections
        self.first_bytes: list[float] = []
        self.num_bytes, self.failed = 0, ""
        self.ended = asyncio.Event()

    def closed(self) -> None:
        self._num_left -= 1
        if not self._num_left:
            self.ended.set()
