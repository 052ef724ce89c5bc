"""Sends equal requests over many connections, as fast as answers come: python http_load.py, settings by JSON on stdin.

Prints JSON: the seconds from the first byte out to the last answer, for each request the seconds to the first byte of
its answer, and the bytes that came.
"""

import asyncio
import json
import sys
import time
from typing import Any

import uvloop


class _Connection(asyncio.Protocol):
    """One connection: the next request goes out once the answer to the last one is complete."""

    def __init__(self, load: "_Load") -> None:
        self._load, self._buffer = load, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        if not self._buffer:
            self._load.first_bytes.append(time.perf_counter() - self._sent)
        self._buffer += data
        if self._is_complete():
            self._load.num_bytes += len(self._buffer)
            if not self._buffer.startswith(b"HTTP/1.1 200"):
                self._load.failed = self._buffer[:500].decode(errors="replace")
            self._buffer = b""
            self._send()

    def _send(self) -> None:
        if not self._load.requests or self._load.failed:
            self._transport.close()
            self._load.closed()
            return
        self._sent = time.perf_counter()
        self._transport.write(self._load.requests.pop())

    def _is_complete(self) -> bool:
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return False
        if b"transfer-encoding: chunked" in head:
            return body.endswith(b"0\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return len(body) >= int(length)


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


async def send_all(host: str, port: int, path: str, bodies: list[Any], num_connections: int) -> dict[str, Any]:
    """Send every body once, over so many connections."""
    requests = []
    for body in reversed(bodies):
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
        requests.append(head.encode() + data)
    load = _Load(requests, num_connections)
    loop, start = asyncio.get_running_loop(), time.perf_counter()
    for _ in range(num_connections):
        await loop.create_connection(lambda: _Connection(load), host, port)
    await load.ended.wait()
    if load.failed:
        raise RuntimeError(f"a request failed: {load.failed}")
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "first_bytes": load.first_bytes, "num_bytes": load.num_bytes}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(uvloop.run(send_all(**json.loads(line)))), flush=True)
