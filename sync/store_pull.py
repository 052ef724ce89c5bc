"""Pulls versions of a store over HTTP from `sync.store_server` into a store of this machine.

    digests of the copy's tensors ──> describe the current version ──> links that the copy lacks, or the whole version
    ──> checksums of links, digests of all changed tensors ──> CURRENT of the copy replaced

If the copy is damaged or has no version of the chain, or a link fails, the current version is fetched whole. An engine
that reads the copy compares the digests again, in its shadow, before it commits.
"""

import http.client
import logging
import os
import urllib.parse
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from time import time_ns

import torch
import xxhash
from torch import Tensor

from sync.digests import tensor_bytes, tensor_digest
from sync.errors import ChecksumMismatch, ManifestMismatch, SyncError, TransferTimeout
from sync.lazy_tensor import LazyTensor
from sync.lease import FileStates, lease_chain, lease_current
from sync.link import MAX_JSON_BYTES, Link
from sync.manifest import TensorSpec, WeightManifest, decode_json, torch_dtype
from sync.own_files import make_directories, opened_file
from sync.pointer import CHANGES, LINK, MANIFEST, VERSIONS, Pointer, check_pointer, is_store
from sync.published import check_file_names, check_tensors, checked_manifest
from sync.shared_files import write_at
from sync.staging import READ_WRITE, staging_directory, sync_directory, write_file
from sync.store import free_name, place_version, point_to, publish_whole, sole_publisher
from sync.store_server import Description, link_of

logger = logging.getLogger("sync")

_CHUNK_BYTES = 1 << 20
_FETCH_BYTES = 16 << 20
"""Bytes of changes for each request."""
_SETTLED_NS = 2_000_000_000
"""Nanoseconds after which a file that is written again has other times, however coarse its file system's clock is."""
_checked: dict[Path, FileStates] = {}
"""Copies of this process -> their files when all tensors had their digests."""
_ATTEMPTS = 5
"""How often a pull begins anew if versions are replaced meanwhile, and a request if its connection breaks."""


def pull(
    url: str, directory: str | PathLike[str], *, key: str, num_threads: int = 1, timeout: float = 60.0
) -> WeightManifest:
    """Bring the store at `directory`, which is created if absent, to the current version of the one served at `url`.

    Only links that it lacks are fetched, if it has a version of the chain, whose tensors have their digests: they are
    read once for each state of their files. Readers of `directory`, such as an engine
    (`update_weights(directory)`), see the version before or the new one, whole. One process at a time pulls into a
    directory, and nothing else publishes there.

    Args:
        num_threads: how many threads fetch, digest and write.
        timeout: seconds without a byte after which a request has failed.

    Returns the manifest. Raises `SyncError` if the server refuses, `TransferTimeout` if it cannot be reached;
    `ManifestMismatch` or `ChecksumMismatch` if bytes are not those of its manifest.
    """
    store, remote = Path(directory), _Remote(url, key, timeout)
    with sole_publisher(store):
        make_directories(store / VERSIONS)
        for _ in range(_ATTEMPTS):
            try:
                return _pull(store, remote, num_threads)
            except _GoneError as problem:
                gone = problem
    raise TransferTimeout(f"{gone} Versions are published faster than they can be fetched: publish less often.")


def _pull(store: Path, remote: "_Remote", num_threads: int) -> WeightManifest:
    there = remote.describe("current")
    local = _sound_pointer(store, num_threads)
    try:
        missing = None if local is None else _missing_links(remote, there, local)
        if local is not None and missing is not None:
            pointer = _fetch_links(store, remote, local, missing, num_threads) if missing else local
            if there.pointer.anchor.manifest_digest in {step.manifest_digest for step in pointer.steps[1:]}:
                publish_whole(store, store, pointer.version, num_threads)  # else its own chain grows without end
            return checked_manifest(lease_current(store))
    except (ChecksumMismatch, ManifestMismatch) as problem:
        logger.warning("%s: %s Version %d is fetched whole.", store, problem, there.pointer.version)
    return _fetch_whole(store, remote, there, num_threads)


def _sound_pointer(store: Path, num_threads: int) -> Pointer | None:
    """The current version of the copy; None if there is none that can be read, or it is damaged, which is logged."""
    try:
        lease = lease_current(store) if is_store(store) else None
        if lease is None or lease.problem:
            return None
        manifest, states = checked_manifest(lease), lease.file_states()
        if _checked.get(store.absolute()) != states:
            check_tensors(lease, manifest.tensors, num_threads)
            if max(time for *_, time in states) < time_ns() - _SETTLED_NS:
                _checked[store.absolute()] = states
    except (ChecksumMismatch, ManifestMismatch) as problem:
        logger.warning("%s is damaged: %s It is fetched anew.", store, problem)
        return None
    return lease.pointer


def _missing_links(remote: "_Remote", there: Description, local: Pointer) -> list[Description] | None:
    """The steps that a copy lacks; None if it has no version that they begin with."""
    steps = there.pointer.steps
    for i, step in enumerate(steps):
        if (step.version, step.manifest_digest) == (local.version, local.manifest_digest):
            return [remote.describe_step(step) for step in steps[i + 1 :]]
    anchor = remote.describe_step(steps[0])
    link = link_of(anchor)
    if link is None or not link.follows(local):
        return None
    return [anchor, *map(remote.describe_step, steps[1:])]


def _fetch_links(
    store: Path, remote: "_Remote", local: Pointer, missing: list[Description], num_threads: int
) -> Pointer:
    """Fetch links, and make the last one current once all tensors that they change have their digests."""
    pointer, changed = local, set()
    for description in missing:
        link = link_of(description)
        if link is None:
            raise ManifestMismatch(f"Version {description.pointer.version} of {remote.url} has no changes.")
        kept = {step.directory for step in pointer.steps} | {step.directory for step in local.steps}
        with staging_directory(store / VERSIONS, kept, recycle=False) as staging:
            write_file(staging / MANIFEST, bytes(description.manifest))
            write_file(staging / LINK, bytes(description.link))
            remote.save_changes(link, staging / CHANGES)
            sync_directory(staging)
            name = free_name(staging.parent, link.version)
            place_version(staging, name)
        digest = xxhash.xxh3_128_hexdigest(bytes(description.link))
        pointer = pointer.link_to(link.version, name, description.pointer.manifest_digest, digest)
        changed |= {changes.name for changes in link.tensors}
    check_pointer(pointer, f"The chain of {store} with what was fetched")
    lease = lease_chain(store, pointer)
    specs = checked_manifest(lease).tensors
    check_tensors(lease, [spec for spec in specs if spec.name in changed], num_threads)
    point_to(store, pointer)
    return pointer


def _fetch_whole(store: Path, remote: "_Remote", there: Description, num_threads: int) -> WeightManifest:
    manifest = decode_json(bytes(there.manifest), WeightManifest, f"The manifest of {remote.url} is not valid")
    manifest.check()
    check_file_names(manifest.tensors)
    tensors: dict[str, _RemoteTensor] = {}
    start = 0
    for spec in manifest.tensors:
        tensors[spec.name] = _RemoteTensor(remote, manifest.version, spec, start)
        start += spec.num_bytes
    tied = {name: tensors[first] for first, *others in manifest.aliases for name in others}
    return publish_whole(store, list((tensors | tied).items()), manifest.version, num_threads)


class _RemoteTensor(LazyTensor):
    """A tensor that is fetched when it is asked for."""

    def __init__(self, remote: "_Remote", version: int, spec: TensorSpec, start: int) -> None:
        super().__init__(spec.shape, torch_dtype(spec.dtype))
        self._remote, self._version, self._spec, self._start = remote, version, spec, start

    def materialize(self) -> Tensor:
        """Fetch it. Raises `ChecksumMismatch` unless it has its digest."""
        out = torch.empty(self.shape, dtype=self.dtype)
        self._remote.fetch(f"/weights/{self._version}?part=tensors", tensor_bytes(out), self._start)
        if tensor_digest(out) != self._spec.digest:
            raise ChecksumMismatch(f"'{self._spec.name}' of version {self._version} at {self._remote.url} was damaged.")
        return out


class _Answer(AbstractContextManager["_Answer"]):
    """The body of an answer; its connection is closed at the end."""

    def __init__(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> None:
        self._connection, self._answer = connection, answer
        self.read, self.readinto = answer.read, answer.readinto

    def __exit__(self, *error: object) -> None:
        self._answer.close()
        self._connection.close()


class _GoneError(SyncError):
    """A version that was current has been replaced."""


class _Remote:
    """A served store. Several threads may fetch."""

    def __init__(self, url: str, key: str, timeout: float) -> None:
        found = urllib.parse.urlsplit(url)
        if found.scheme not in ("http", "https") or not found.hostname:
            raise SyncError(f"url={url!r} is not allowed: must be http://HOST:PORT, as `StoreServer.url` is.")
        if not isinstance(key, str) or not key.isascii() or not key.isprintable():
            raise SyncError("key is not allowed: must be the key of the server, printable characters of ASCII.")
        self.url = url.rstrip("/")
        self._place, self._prefix = found, found.path.rstrip("/")
        self._headers, self._timeout = {"Authorization": f"Bearer {key}"}, timeout

    def describe(self, version: str) -> Description:
        """The description of a version. Raises `_GoneError` if it is not in the current chain."""
        content = bytearray()
        with self._request(f"/weights/{version}", {}) as answer:
            while piece := answer.read(_CHUNK_BYTES):
                content += piece
                if len(content) > 2 * MAX_JSON_BYTES:
                    raise ManifestMismatch(f"{self.url} describes version {version} in more bytes than are read.")
        description = decode_json(content, Description, f"{self.url}: the description of {version} is not valid")
        check_pointer(description.pointer, f"{self.url}: the description of {version}")
        return description

    def describe_step(self, step: Pointer) -> Description:
        """The description of a step of a chain. Raises `_GoneError` if it is another version of that number."""
        found = self.describe(str(step.version))
        if found.pointer.manifest_digest != step.manifest_digest:
            raise _GoneError(f"Version {step.version} of {self.url} has been replaced.")
        return found

    def save_changes(self, link: Link, path: Path) -> None:
        """Write the changes of a link to a new file; its reader checks them."""
        buffer = memoryview(bytearray(min(_FETCH_BYTES, link.num_bytes)))
        with opened_file(path, READ_WRITE) as file:
            for at in range(0, link.num_bytes, _FETCH_BYTES):
                piece = buffer[: link.num_bytes - at]
                self.fetch(f"/weights/{link.version}?part={CHANGES}", piece, at)
                write_at(file, piece, at)
            os.fsync(file)

    def fetch(self, path: str, out: memoryview, start: int) -> None:
        """Fill `out` with the bytes from `start` on; a broken connection is made again, for the rest."""
        attempts = 0
        while out:
            try:
                with self._request(path, {"Range": f"bytes={start}-{start + len(out) - 1}"}) as answer:
                    while out and (count := answer.readinto(out)):
                        out, start, attempts = out[count:], start + count, 0
            except (OSError, http.client.HTTPException) as problem:
                cause = f": {problem}"
            else:
                cause = " with too few bytes"
            attempts += 1
            if out and attempts == _ATTEMPTS:
                raise TransferTimeout(f"{self.url}{path} ended{cause}, {attempts} times.")

    def _request(self, path: str, headers: dict[str, str]) -> "_Answer":
        kind = http.client.HTTPSConnection if self._place.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._place.hostname or "", self._place.port, timeout=self._timeout)
        try:
            connection.request("GET", self._prefix + path, headers=self._headers | headers)
            answer = connection.getresponse()
            if answer.status in (200, 206):
                return _Answer(connection, answer)
            message = answer.read(_CHUNK_BYTES).decode(errors="replace")
        except OSError as problem:
            connection.close()
            raise TransferTimeout(f"{self.url} cannot be reached: {problem}.") from None
        connection.close()
        kinds = {404: _GoneError}
        raise kinds.get(answer.status, SyncError)(f"{self.url}{path} was refused with {answer.status}: {message}")
