"""Downloads pictures from allowed hosts by HTTP/1.1, on the event loop.

    name ── resolved once ──> addresses, all checked ──> a connection to one of them ──> an answer, bounded in time and
                                                                                         size; a redirect begins anew

The name is not resolved again when the connection is made: an address that was checked is the one that is connected to.
Proxies that the environment names are not used.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable
from functools import cache
from typing import Any
from urllib.parse import urljoin

from rollout_engine.base.errors import RequestError
from rollout_engine.base.threads import run_in_thread
from rollout_engine.serve.media.hosts import AllowedHosts, Target
from rollout_engine.serve.problems import HttpProblem

_MAX_HEADER_BYTES = 64 << 10
_READ_BYTES = 64 << 10
_MOST_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_ADDRESSES = 4
"""Addresses of a host that are tried."""
_OTHER_KINDS = ("application/octet-stream", "binary/octet-stream")
"""Content types that stores give any file."""


async def download(
    url: str, hosts: AllowedHosts, field: str, *, most: int, seconds: float, count: Callable[[int], None]
) -> bytes:
    """The picture at an http(s) URL, of at most `most` bytes, within `seconds`. `count` is called with each new size.

    Raises `RequestError` for a URL that is not allowed or is no picture's, and `HttpProblem`: 413 for a picture that is
    too long, 502 and 504 for a host that does not answer as it should, or in time. All name the field.
    """
    place = url
    try:
        async with asyncio.timeout(seconds):
            for _ in range(_MOST_REDIRECTS + 1):
                target = hosts.target(url, field)
                place = target.authority
                response = await _request(target, hosts, field, most, count)
                if response.location is None:
                    return b"".join(response.parts)
                url = _follow_redirect(url, response.location, field)
    except TimeoutError:
        raise _problem(504, field, place, f"has not sent the picture within {seconds:g} seconds") from None
    raise _problem(502, field, place, f"redirects more than {_MOST_REDIRECTS} times")


def _follow_redirect(url: str, location: str, field: str) -> str:
    """The URL that an answer to `url` leads to; it is checked like any other."""
    found = urljoin(url, location)
    if url.lower().startswith("https:") and not found.lower().startswith("https:"):
        raise RequestError.for_field(field, "a redirect from https to http", "a URL that stays with https")
    return found


async def _request(
    target: Target, hosts: AllowedHosts, field: str, most: int, count: Callable[[int], None]
) -> "_Response":
    """The answer to a GET."""
    reader, writer = await _connect(target, hosts, field)
    try:
        head = f"GET {target.path} HTTP/1.1", f"Host: {target.authority}", "User-Agent: rollout-engine"
        more = "Accept: image/*", "Accept-Encoding: identity", "Connection: close"
        writer.write("\r\n".join((*head, *more, "", "")).encode("ascii"))
        return await _read(reader, _Response(target, field, most, count))
    except (OSError, EOFError) as problem:
        if isinstance(problem, TimeoutError):
            raise
        raise _problem(502, field, target.authority, f"has closed the connection ({type(problem).__name__})") from None
    finally:
        writer.transport.abort()


async def _connect(
    target: Target, hosts: AllowedHosts, field: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the first of the host's addresses that answers, all of which must be permitted."""
    try:
        addresses = await run_in_thread(_resolve, target)
    except OSError as problem:
        raise _problem(502, field, target.authority, f"has no address ({problem.strerror})") from None
    for address in addresses:
        if not hosts.permits(ipaddress.ip_address(address)):
            hint = "Or start the server with --allow-media and this address or its network."
            what = f"a URL of {target.host}, which leads to {address}"
            raise RequestError.for_field(field, what, "one of a host with public addresses", hint)
    tls: dict[str, Any] = {"ssl": _tls(), "server_hostname": target.host} if target.scheme == "https" else {}
    last: Exception = OSError("no address")
    for address in addresses:
        try:
            return await asyncio.open_connection(address, target.port, **tls)
        except OSError as problem:
            last = problem
    raise _problem(502, field, target.authority, f"cannot be connected to ({type(last).__name__})")


def _resolve(target: Target) -> list[str]:
    """The addresses of a host, without repetition. Raises `OSError`."""
    found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    if target.scheme == "https":
        _tls()  # made on this thread, since it reads files
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))[:_MOST_ADDRESSES]


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


class _Response:
    """An answer as httptools reads it: its methods are called by the parser.

    An error is kept as `problem`, since the parser would wrap it.
    """

    def __init__(self, target: Target, field: str, most: int, count: Callable[[int], None]) -> None:
        import httptools

        self.parser: Any = httptools.HttpResponseParser(self)
        self.parser_error: type[Exception] = httptools.HttpParserError
        self.target, self.field, self.parts = target, field, list[bytes]()
        self.location: str | None = None
        self.problem: BaseException | None = None
        self.has_header = self.is_complete = False
        self._most, self._count, self._size = most, count, 0
        self._headers: dict[str, str] = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        if status < 200:
            self._headers.clear()
            return
        self.has_header = True
        try:
            self._check(status)
        except (RequestError, HttpProblem) as problem:
            self.problem = problem

    def on_body(self, data: bytes) -> None:
        if self.problem is None and self.location is None:
            self._size += len(data)
            self.parts.append(data)
            try:
                self._count(len(data))
                self._check_size(self._size)
            except (RequestError, HttpProblem) as problem:
                self.problem = problem

    def on_message_complete(self) -> None:
        self.is_complete = self.has_header

    def end(self) -> None:
        """The host has closed the connection. Raises `EOFError` unless that is how it ends the picture."""
        if not self.has_header or "content-length" in self._headers or "transfer-encoding" in self._headers:
            raise EOFError

    def _check(self, status: int) -> None:
        """Raise unless the header is that of a picture, or of a redirect."""
        get = self._headers.get
        if status in _REDIRECTS and get("location"):
            self.location = self._headers["location"]
            return
        if status != 200:
            code = 502 if status >= 500 else 400
            raise _problem(code, self.field, self.target.authority, f"answers with status {status}, not 200")
        kind = get("content-type", "").partition(";")[0].strip().lower()
        if kind and not kind.startswith("image/") and kind not in _OTHER_KINDS:
            raise RequestError.for_field(self.field, f"content of type {kind:.60}", "the URL of a picture (image/...)")
        if get("content-encoding", "identity").lower() != "identity":
            raise _problem(502, self.field, self.target.authority, "answers with a content encoding, unasked")
        length = get("content-length", "")
        if length.isdigit():
            self._check_size(int(length))

    def _check_size(self, size: int) -> None:
        if size > self._most:
            raise too_long(self.field, self._most)


async def _read(reader: asyncio.StreamReader, response: _Response) -> _Response:
    """Read an answer to its end, or to a redirect."""
    num_bytes = 0
    while not response.is_complete and response.location is None:
        data = await reader.read(_READ_BYTES)
        if not data:
            response.end()
            break
        num_bytes += len(data)
        try:
            response.parser.feed_data(data)
        except response.parser_error:  # also for bytes behind a complete answer, which are no part of it
            if not (response.is_complete or response.location or response.problem):
                what = "does not answer by HTTP/1.1"
                raise _problem(502, response.field, response.target.authority, what) from None
        if response.problem is not None:
            raise response.problem
        if not response.has_header and num_bytes > _MAX_HEADER_BYTES:
            raise _problem(502, response.field, response.target.authority, "answers with too long a header")
    return response


def too_long(field: str, most: int) -> HttpProblem:
    """The refusal of a picture with too many bytes."""
    advice = "send a smaller one, or start the server with a larger --max-picture-bytes"
    return HttpProblem(413, f"{field}: a picture may have {most} bytes, and this one has more: {advice}.", field=field)


def _problem(status: int, field: str, place: str, what: str) -> HttpProblem:
    return HttpProblem(status, f"{field}: the host {place:.200} {what}.", field=field)
