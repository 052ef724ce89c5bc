"""A published version on disk, and how it is read: leased, checked, into this process's own memory.

    store/
      CURRENT                     which version directory, and the digest of its manifest; replaced atomically
      LOCK                        held (flock) by the one publisher
      versions/000042/
        manifest.json             the authority: names, shapes, dtypes, digests, ties
        meta.json                 for `TensorDict.load_memmap`; only compared with what it must be, never trusted
        lease                     held (flock, shared) by readers; a version is recycled only when nobody holds it
        model.embed.weight.memmap one file for each tensor

A reader trusts CURRENT's digest for the manifest and the manifest for everything else: exactly the files it lists, of
exactly their sizes, with their digests. Every file and directory has to be this user's own, and no link (see
`sync.own_files`): opening one never waits. Nothing but JSON of a known form is decoded, and nothing is mapped: a file
that is cut meanwhile causes an error, not the end of the process.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash
from torch import Tensor

from sync.errors import ChecksumMismatch, ManifestMismatch, SyncError, TransferTimeout
from sync.lazy_tensor import Fetch, FileTensor
from sync.manifest import TensorSpec, WeightManifest, decode_json, first_names, torch_dtype
from sync.own_files import open_directory, open_file, opened_directory, read_small
from sync.shared_files import read_at, try_lock
from sync.threads import in_threads

CURRENT, LOCK, VERSIONS = "CURRENT", "LOCK", "versions"
MANIFEST, META, LEASE = "manifest.json", "meta.json", "lease"
_SUFFIX = ".memmap"
_MAX_POINTER_BYTES = 4096
_MAX_JSON_BYTES = 2**28
_LEASE_SECONDS = 10.0
_Found = TypeVar("_Found")


class Pointer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of CURRENT."""

    version: int
    directory: str
    """Name in `versions/`: the version in at least six digits, then `-1`, `-2`, ... if that was taken."""
    manifest_digest: str
    """xxh3-128 of the bytes of its manifest.json."""


class PublishedWeights(AbstractContextManager["PublishedWeights"]):
    """A lease on one published version. A context manager; or `close` it.

    Its tensors are copies in this process's memory: writing to one changes nothing in the store, and one that is held
    after `close` keeps its values. The version's files stay untouched as long as this is open.
    """

    def __init__(self, lease: "Lease", manifest: WeightManifest, tensors: dict[str, Tensor]) -> None:
        self._lease: Lease | None = lease
        self._tensors = tensors
        self.manifest = manifest

    @property
    def version(self) -> int:
        """Policy version of the weights."""
        return self.manifest.version

    @property
    def digest(self) -> str:
        """Total digest of the weights."""
        return self.manifest.digest

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor; tied names share one. `SyncError` after `close`."""
        if self._lease is None:
            raise SyncError(f"The lease on version {self.version} is closed: open the store again.")
        return self._tensors

    def close(self) -> None:
        """End the lease."""
        self._lease, self._tensors = None, {}

    def __exit__(self, *error: object) -> None:
        self.close()


class Lease:
    """Open descriptors of one version directory; its shared lock ends when this object does."""

    def __init__(self, directory: int, lock: int, pointer: Pointer) -> None:
        self.directory, self.pointer, self._lock = directory, pointer, lock

    def __del__(self) -> None:
        os.close(self._lock)
        os.close(self.directory)


def is_store(directory: Path) -> bool:
    """Whether something has been published in `directory`, be it damaged."""
    return os.path.lexists(directory / CURRENT)


def open_current(directory: str | os.PathLike[str], *, num_threads: int = 1) -> PublishedWeights:
    """Lease the current version of the store at `directory`, check every file, and read its tensors.

    Args:
        num_threads: how many threads read and digest.

    Raises `ManifestMismatch` when this is no store, or its files are not those of its manifest; `ChecksumMismatch`
    when bytes are not those published; `TransferTimeout` when versions are replaced faster than this reader can lease
    one, for ten seconds.
    """
    lease = lease_current(Path(directory))
    manifest = checked_manifest(lease)
    files = [_published_tensor(lease, spec) for spec in manifest.tensors]
    sizes = [spec.num_bytes for spec in manifest.tensors]
    tensors = in_threads(FileTensor.materialize, files, num_threads, sizes)
    return PublishedWeights(lease, manifest, _by_every_name(manifest, tensors))


def read_current(directory: Path) -> dict[str, FileTensor]:
    """The current version of the store at `directory`: name -> tensor, read when it is asked for.

    Raises as `open_current` does.
    """
    lease = lease_current(directory)
    manifest = checked_manifest(lease)
    return _by_every_name(manifest, [_published_tensor(lease, spec) for spec in manifest.tensors])


def lease_current(directory: Path) -> Lease:
    """Lease the version that CURRENT names, whatever publishers do meanwhile. Raises as `open_current` does."""
    deadline = time.monotonic() + _LEASE_SECONDS
    while time.monotonic() < deadline:
        pointer = read_pointer(directory)
        lease = _try_lease(directory, pointer)
        # Leased and still current: from here on no publisher recycles it.
        if lease is not None and read_pointer(directory) == pointer:
            return lease
        time.sleep(0.001)
    what = f"{directory}: no lease within {_LEASE_SECONDS:g} s"
    raise TransferTimeout(f"{what}: versions are published faster than readers can lease them. Publish less often.")


def read_pointer(directory: Path) -> Pointer:
    """The content of CURRENT. `ManifestMismatch` when there is none, or it is damaged."""
    try:
        with opened_directory(directory) as store:
            content = read_small(CURRENT, _MAX_POINTER_BYTES, dir_fd=store)
    except FileNotFoundError:
        if not directory.exists():
            raise ManifestMismatch(f"{directory.absolute()} does not exist: give the path of a store.") from None
        what = "holds a bare memory-mapped TensorDict" if (directory / META).exists() else "is not a published store"
        advice = "sync.publish(directory, source, version) makes one."
        raise ManifestMismatch(f"{directory} {what}: it has no {CURRENT} file. {advice}") from None
    except OSError as problem:
        raise _unusable(directory, problem) from None
    pointer = decode_json(content, Pointer, f"{directory / CURRENT} is damaged", " Publish again.")
    if not re.fullmatch(r"[0-9]{6,19}(-[0-9]{1,9})?", pointer.directory):
        raise ManifestMismatch(f"{directory / CURRENT} is damaged: it names no version. Publish again.")
    return pointer


def checked_manifest(lease: Lease) -> WeightManifest:
    """The manifest of a leased version, after checks that it is the one published and that the files are exactly its.

    Raises `ManifestMismatch` or `ChecksumMismatch`.
    """
    version = lease.pointer.version
    try:
        content = read_small(MANIFEST, _MAX_JSON_BYTES, dir_fd=lease.directory)
        meta = read_small(META, _MAX_JSON_BYTES, dir_fd=lease.directory)
    except OSError as problem:
        what = f"{problem.filename} of version {version} cannot be used: {problem.strerror}"
        raise ManifestMismatch(f"{what}. Publish again.") from None
    if xxhash.xxh3_128_hexdigest(content) != lease.pointer.manifest_digest:
        raise ChecksumMismatch(f"The manifest of version {version} is not the one published: publish it again.")
    manifest = decode_json(content, WeightManifest, f"The manifest of version {version} is not valid")
    manifest.check()
    if manifest.version != version:
        raise ChecksumMismatch(f"{CURRENT} says version {version}, its manifest {manifest.version}: publish it again.")
    check_file_names(manifest.tensors)
    if meta != meta_json(manifest):
        raise ChecksumMismatch(f"{META} of version {version} contradicts its manifest: publish it again.")
    wanted = {MANIFEST, META, LEASE, *(file_name(spec.name) for spec in manifest.tensors)}
    found = set(os.listdir(lease.directory))
    if found != wanted:
        extra, missing = sorted(found - wanted), sorted(wanted - found)
        what = "; ".join(
            f"{len(names)} {kind}: {first_names(names)}"
            for kind, names in (("extra", extra), ("missing", missing))
            if names
        )
        raise ManifestMismatch(f"Files of version {version} are not those of its manifest ({what}): publish it again.")
    for spec in manifest.tensors:
        with opened_tensor(lease, spec):
            pass  # it can be opened, and has its size
    return manifest


@contextmanager
def opened_tensor(lease: Lease, spec: TensorSpec) -> Iterator[Fetch]:
    """Open a tensor's file; yields the function that fetches its bytes.

    Raises `ManifestMismatch` unless it is this user's own (`sync.own_files.open_file`) and of the right size.
    """
    try:
        file = open_file(file_name(spec.name), dir_fd=lease.directory)
    except OSError as problem:
        raise ManifestMismatch(
            f"The file of '{spec.name}' cannot be used: {problem.strerror}. Publish again."
        ) from None

    def fetch(out: memoryview, start: int) -> None:
        if not read_at(file, out, start):
            raise ChecksumMismatch(f"The file of '{spec.name}' was cut while it was read: publish it again.")

    try:
        if (size := os.fstat(file).st_size) != spec.num_bytes:
            what = f"has {size} bytes, the manifest says {spec.num_bytes}"
            raise ManifestMismatch(f"The file of '{spec.name}' {what}: publish version {lease.pointer.version} again.")
        yield fetch
    finally:
        os.close(file)


def file_name(name: str) -> str:
    """The name of a tensor's file, the same as TensorDict's."""
    return name + _SUFFIX


def check_file_names(specs: Iterable[TensorSpec]) -> None:
    """Raise `ManifestMismatch` unless every name can be a file of its own in one directory."""
    for spec in specs:
        file = file_name(spec.name)
        if "/" in file or "\0" in file or file.startswith(".") or len(file.encode()) > 255:
            raise ManifestMismatch(f"'{spec.name}' cannot be the name of a published tensor: it is no plain file name.")


def meta_json(manifest: WeightManifest) -> bytes:
    """The metadata with which `TensorDict.load_memmap` finds the same tensors."""
    leaves = {
        spec.name: {"device": "cpu", "shape": spec.shape, "dtype": f"torch.{spec.dtype}", "is_nested": False}
        for spec in manifest.tensors
    }
    root = {"shape": [], "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}
    return json.dumps(leaves | root).encode()


def _try_lease(directory: Path, pointer: Pointer) -> Lease | None:
    """Lease that version; None while a publisher is at work on its directory, or has replaced it."""
    try:
        with opened_directory(directory) as store, opened_directory(VERSIONS, dir_fd=store) as versions:
            version = open_directory(pointer.directory, dir_fd=versions)
        try:
            lock = open_file(LEASE, dir_fd=version)
        except OSError:
            os.close(version)
            raise
    except OSError as problem:
        if read_pointer(directory) != pointer:
            return None
        raise _unusable(directory, problem) from None
    lease = Lease(version, lock, pointer)
    return lease if try_lock(lock, shared=True) else None


def _unusable(directory: Path, problem: OSError) -> ManifestMismatch:
    """The error if a part of the store at `directory` cannot be opened."""
    part = "" if problem.filename == os.fspath(directory) else f": {problem.filename}"
    return ManifestMismatch(f"{directory}{part} cannot be used: {problem.strerror}. Mend that, or publish again.")


def _published_tensor(lease: Lease, spec: TensorSpec) -> FileTensor:
    def fetch(out: memoryview, start: int) -> None:
        with opened_tensor(lease, spec) as fetch_from:
            fetch_from(out, start)

    def check_digest(found: str) -> None:
        if found != spec.digest:
            what = f"'{spec.name}' of version {lease.pointer.version} does not have its digest"
            raise ChecksumMismatch(f"{what}: publish it again.")

    return FileTensor(spec.shape, torch_dtype(spec.dtype), fetch, check_digest=check_digest)


def _by_every_name(manifest: WeightManifest, found: list[_Found]) -> dict[str, _Found]:
    """The tensors that were found for those of the manifest, by every name, tied ones too."""
    tensors = {spec.name: tensor for spec, tensor in zip(manifest.tensors, found, strict=True)}
    return tensors | {name: tensors[first] for first, *others in manifest.aliases for name in others}
