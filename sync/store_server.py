"""Serves a store over HTTP, for engines that share no disk with the trainer; `sync.store_pull` is the other end.

    trainer's machine                                   engine's machine
    sync.serve_store(directory, key=...)  <── HTTP ──   sync.pull(url, copy, key=...) ── engine.update_weights(copy)

    GET /weights/{version}                 `Description`; "current" is the current version's name
    GET /weights/{version}?part=changes    bytes of its changes against the version before
    GET /weights/{version}?part=tensors    bytes of all tensors, one after the other as its manifest lists them

Parts are given by ranges too (`Range: bytes=FIRST-LAST`). Every request needs the key (`Authorization: Bearer KEY`).
"""

import hmac
import logging
import os
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from sync.errors import ChecksumMismatch, ManifestMismatch, SyncError
from sync.lease import Lease, lease_current
from sync.link import MAX_JSON_BYTES, Link
from sync.manifest import TensorSpec, WeightManifest, decode_json
from sync.own_files import opened_file, read_small
from sync.pointer import CHANGES, LINK, MANIFEST, Pointer, read_pointer
from sync.published import opened_tensor
from sync.shared_files import read_at

logger = logging.getLogger("sync")

_LEAST_KEY = 16
_CHUNK_BYTES = 1 << 20
_SOCKET_SECONDS = 60.0
_MAX_CONNECTIONS = 256
"""Open at once, each with a thread of the trainer's process."""
_WAIT_SECONDS = 1.0
"""How long one more waits for the end of another, before it is closed."""
_NO_LINK = b"null"
_PATH = re.compile(r"/weights/(current|[0-9]{1,19})")
_RANGE = re.compile(r"bytes=([0-9]{1,19})-([0-9]{1,19})?")


class Description(msgspec.Struct, frozen=True, omit_defaults=True):
    """A version as the server describes it."""

    pointer: Pointer
    """Its steps, from the anchor on; directories are the server's."""
    manifest: msgspec.Raw
    """The bytes of its manifest.json."""
    link: msgspec.Raw = msgspec.Raw(_NO_LINK)
    """The bytes of its link.json, if it has changes against the version before."""


class StoreServer(AbstractContextManager["StoreServer"]):
    """Serves the current version of a store, and the steps of its chain, until closed. It holds a lease on them."""

    def __init__(self, directory: Path, key: str, host: str, port: int) -> None:
        self._directory, self._key = directory, key.encode()
        self._lock = threading.Lock()
        self._lease: tuple[Pointer, Lease] | None = None
        handler = type("Handler", (_Handler,), {"store": self})
        try:
            self._server = _Server((host, port), handler)
        except OSError as problem:
            raise SyncError(f"{directory} cannot be served at {host}:{port}: {problem.strerror}.") from None
        self.url = f"http://{host}:{self._server.server_port}"
        """Address for `pull`."""
        serve = partial(self._server.serve_forever, poll_interval=0.05)  # seconds that `close` may wait
        self._thread = threading.Thread(target=serve, name="store-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the server, and its lease."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._lease = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def takes_key(self, authorization: str) -> bool:
        """Whether a request has the key."""
        return hmac.compare_digest(authorization.encode(), b"Bearer " + self._key)

    def lease_version(self, name: str) -> Lease | None:
        """A lease on a version of the current chain; None if it has none of that name."""
        with self._lock:
            pointer = read_pointer(self._directory)
            if self._lease is None or self._lease[0] != pointer:
                self._lease = None  # else its steps could not be removed until the next request
                self._lease = pointer, lease_current(self._directory)
            lease = self._lease[1]
            return lease if name == "current" else lease.at(int(name))


def serve_store(directory: str | PathLike[str], *, key: str, host: str = "127.0.0.1", port: int = 0) -> StoreServer:
    """Serve the store at `directory` by HTTP, on threads of this process, to those that have `key`.

    Args:
        key: a secret of 16 characters or more, which `pull` is given too. It crosses the network as it is: use a
            network of your own, or a proxy with TLS in front.
        port: 0 is any free one; `StoreServer.url` has it.

    Raises `SyncError` for a key that is too short, a directory that does not exist, and an address that cannot be had.
    """
    if not isinstance(key, str) or len(key) < _LEAST_KEY or not key.isascii() or not key.isprintable():
        raise SyncError(f"key is not allowed: must be {_LEAST_KEY} printable characters of ASCII or more.")
    if not Path(directory).is_dir():
        what = f"{directory} is no directory, and has no store to serve"
        advice = "Publish a version there first (sync.publish), or make it, if the server is to start before"
        raise SyncError(f"{what}. {advice}.")
    return StoreServer(Path(directory), key, host, port)


class _Server(ThreadingHTTPServer):
    """Serves `_MAX_CONNECTIONS` connections at once."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether a connection may be served; it is closed if not."""
        return self._free.acquire(timeout=_WAIT_SECONDS)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    store: StoreServer
    protocol_version = "HTTP/1.1"
    timeout = _SOCKET_SECONDS

    def log_message(self, format: str, *values: Any) -> None:
        logger.debug("store server: %s", format % values)

    def do_GET(self) -> None:
        """Answer a request."""
        if not self.store.takes_key(self.headers.get("Authorization", "")):
            return self._refuse(401, "The key is missing or another: send Authorization: Bearer KEY.")
        path, _, query = self.path.partition("?")
        found = _PATH.fullmatch(path)
        part = urllib.parse.parse_qs(query).get("part", [""])[-1]
        if found is None or part not in ("", CHANGES, "tensors"):
            return self._refuse(404, "Expected /weights/{version}, ?part=changes or ?part=tensors.")
        try:
            lease = self.store.lease_version(found[1])
            if lease is None:
                return self._refuse(404, f"Version {found[1]} is not, or no longer, in the current chain.")
            if not part:
                return self._reply(msgspec.json.encode(_describe(lease)))
            self._send_part(lease, part)
        except SyncError as problem:
            self._refuse(503, str(problem))
        except OSError:  # the client has left
            self.close_connection = True

    def _send_part(self, lease: Lease, part: str) -> None:
        description = _describe(lease)
        link = link_of(description)
        if part == CHANGES and link is None:
            return self._refuse(404, f"Version {lease.pointer.version} has no changes: it was published whole.")
        specs = msgspec.json.decode(description.manifest, type=WeightManifest).tensors
        size = link.num_bytes if part == CHANGES and link is not None else sum(spec.num_bytes for spec in specs)
        found = _RANGE.fullmatch(self.headers.get("Range", "bytes=0-"))
        start = int(found[1]) if found else size
        end = min(int(found[2]) + 1 if found and found[2] else size, size)
        if start >= end and (start or size):
            return self._refuse(416, f"Range is not allowed: expected bytes=FIRST-LAST of {size} bytes.")
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(end - start))
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.end_headers()
        pieces = _read_changes(lease, start, end) if part == CHANGES else _read_tensors(lease, specs, start, end)
        try:
            for piece in pieces:
                self.wfile.write(piece)
        except (SyncError, OSError) as problem:  # the status is sent: the client finds too few bytes
            logger.warning("store server: version %d was not sent whole: %s", lease.pointer.version, problem)
            self.close_connection = True

    def _reply(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: int, message: str) -> None:
        self._reply(msgspec.json.encode({"error": message}), status)


def _describe(lease: Lease) -> Description:
    if lease.links:
        top = lease.links[-1]
        return Description(lease.pointer, msgspec.Raw(top.manifest), msgspec.Raw(top.content))
    try:
        manifest = read_small(MANIFEST, MAX_JSON_BYTES, dir_fd=lease.directory)
        has_link = LINK in os.listdir(lease.directory)
        link = read_small(LINK, MAX_JSON_BYTES, dir_fd=lease.directory) if has_link else _NO_LINK
    except OSError as problem:
        what = f"{problem.filename} of version {lease.pointer.version} cannot be used: {problem.strerror}"
        raise ManifestMismatch(f"{what}. Publish again.") from None
    return Description(lease.pointer, msgspec.Raw(manifest), msgspec.Raw(link))


def _read_changes(lease: Lease, start: int, end: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, end - start)))
    directory = lease.links[-1].directory if lease.links else lease.directory
    with opened_file(CHANGES, dir_fd=directory) as file:
        for at in range(start, end, _CHUNK_BYTES):
            piece = buffer[: end - at]
            if not read_at(file, piece, at):
                raise ChecksumMismatch(f"{CHANGES} was cut while it was read.")
            yield piece


def _read_tensors(lease: Lease, specs: list[TensorSpec], start: int, end: int) -> Iterator[memoryview]:
    buffer, first = memoryview(bytearray(_CHUNK_BYTES)), 0
    for spec in specs:
        low, high = max(start - first, 0), min(end - first, spec.num_bytes)
        first += spec.num_bytes
        if low >= high:
            continue
        with opened_tensor(lease, spec) as fetch:
            for at in range(low, high, _CHUNK_BYTES):
                piece = buffer[: high - at]
                fetch(piece, at)
                yield piece


def link_of(description: Description) -> Link | None:
    """The link of a description; None for a version that was published whole."""
    content = bytes(description.link)
    what = f"The link of version {description.pointer.version} is not valid"
    return None if content == _NO_LINK else decode_json(content, Link, what)
