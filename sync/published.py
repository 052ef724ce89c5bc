"""A published version on disk, and how it is read: leased, checked, into this process's own memory.

    store/
      CURRENT                     which directories hold the current version, and the digests of their manifests and
                                  links; replaced atomically (`sync.pointer`)
      LOCK                        held (flock) by the one publisher
      versions/000042/
        manifest.json             the authority: names, shapes, dtypes, digests, ties
        meta.json                 for `TensorDict.load_memmap`; only compared with what it must be, never trusted
        lease                     held (flock, shared) by readers; a version is recycled only when nobody holds it
        model.embed.weight.memmap one file for each tensor
      versions/000043/            a link: changes against version 42 (`sync.link`), if published with `delta=True`

A reader trusts CURRENT's digests for manifests and links, and the manifest for everything else: exactly the files it
lists, of exactly their sizes, with their digests; a tensor of a link is the anchor's with all changes, and has the
digest of the link's manifest. Every file and directory has to be this user's own, and no link of the file system (see
`sync.own_files`): opening one never waits. Nothing but JSON of a known form and zlib of a known size is decoded, and
nothing is mapped: a file that is cut meanwhile causes an error, not the end of the process.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import xxhash
from torch import Tensor

from sync.errors import ChecksumMismatch, ManifestMismatch, SyncError
from sync.lazy_tensor import Fetch, FileTensor
from sync.lease import Lease, lease_current
from sync.link import MAX_JSON_BYTES, same_forms
from sync.manifest import TensorSpec, WeightManifest, decode_json, first_names, torch_dtype
from sync.own_files import open_file, read_small
from sync.pointer import CHANGES, CURRENT, LEASE, LINK, MANIFEST, META, Pointer, is_store
from sync.shared_files import read_at
from sync.threads import in_threads

__all__ = [
    "Lease",
    "Pointer",
    "PublishedWeights",
    "checked_manifest",
    "is_store",
    "lease_current",
    "open_current",
    "opened_tensor",
    "read_current",
]
_SUFFIX = ".memmap"
_Found = TypeVar("_Found")


class PublishedWeights(AbstractContextManager["PublishedWeights"]):
    """A lease on one published version. A context manager; or `close` it.

    Its tensors are copies in this process's memory: writing to one changes nothing in the store, and one that is held
    after `close` keeps its values. The version's files stay untouched as long as this is open.
    """

    def __init__(self, lease: Lease, manifest: WeightManifest, tensors: dict[str, Tensor]) -> None:
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


def open_current(directory: str | os.PathLike[str], *, num_threads: int = 1) -> PublishedWeights:
    """Lease the current version of the store at `directory`, check every file, and read its tensors.

    Args:
        num_threads: how many threads read and digest.

    If a link of the current version is damaged, its anchor, the last whole version, is read and a warning logged.

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


def checked_manifest(lease: Lease) -> WeightManifest:
    """The manifest of a leased version, after checks that it is the one published and that the files are exactly its.

    Raises `ManifestMismatch` or `ChecksumMismatch`.
    """
    try:
        whole = _check_anchor(lease)
        if not lease.links:
            return whole
        top = lease.links[-1]
        manifest = _decode_manifest(top.manifest, lease.pointer)
        if not same_forms(manifest.tensors, {spec.name: spec for spec in whole.tensors}):
            what = f"{top.where}/{MANIFEST} has other names, dtypes or shapes than its anchor"
            raise ManifestMismatch(f"{what}: publish it again.")
        return manifest
    except SyncError as problem:
        if not lease.problem:
            raise
        raise type(problem)(f"{lease.problem} Nor can its anchor be used: {problem}") from None


def _check_anchor(lease: Lease) -> WeightManifest:
    """The manifest of the directory that holds whole tensors, after checks of all its files."""
    anchor = lease.pointer.anchor
    try:
        content = read_small(MANIFEST, MAX_JSON_BYTES, dir_fd=lease.directory)
        meta = read_small(META, MAX_JSON_BYTES, dir_fd=lease.directory)
    except OSError as problem:
        what = f"{problem.filename} of version {anchor.version} cannot be used: {problem.strerror}"
        raise ManifestMismatch(f"{what}. Publish again.") from None
    if xxhash.xxh3_128_hexdigest(content) != anchor.manifest_digest:
        raise ChecksumMismatch(f"The manifest of version {anchor.version} is not the one published: publish it again.")
    manifest = _decode_manifest(content, anchor)
    if meta != meta_json(manifest):
        raise ChecksumMismatch(f"{META} of version {anchor.version} contradicts its manifest: publish it again.")
    wanted = {MANIFEST, META, LEASE, *(file_name(spec.name) for spec in manifest.tensors)}
    found = set(os.listdir(lease.directory))
    if not wanted <= found <= wanted | {LINK, CHANGES}:
        extra, missing = sorted(found - wanted), sorted(wanted - found)
        what = "; ".join(
            f"{len(names)} {kind}: {first_names(names)}"
            for kind, names in (("extra", extra), ("missing", missing))
            if names
        )
        raise ManifestMismatch(
            f"Files of version {anchor.version} are not those of its manifest ({what}): publish it again."
        )
    for spec in manifest.tensors:
        with _opened_file(lease, spec):
            pass  # it can be opened, and has its size
    return manifest


def _decode_manifest(content: bytes, pointer: Pointer) -> WeightManifest:
    version = pointer.version
    manifest = decode_json(content, WeightManifest, f"The manifest of version {version} is not valid")
    manifest.check()
    if manifest.version != version:
        raise ChecksumMismatch(f"{CURRENT} says version {version}, its manifest {manifest.version}: publish it again.")
    check_file_names(manifest.tensors)
    return manifest


@contextmanager
def opened_tensor(lease: Lease, spec: TensorSpec) -> Iterator[Fetch]:
    """Open a tensor; yields the function that fetches its bytes: those of the anchor's file, with the links' changes.

    Raises `ManifestMismatch` unless the file is this user's own (`sync.own_files.open_file`) and of the right size;
    `ChecksumMismatch` if changes cannot be decoded.
    """
    width, changes = torch_dtype(spec.dtype).itemsize, lease.changes(spec)
    with _opened_file(lease, spec) as file:

        def fetch(out: memoryview, start: int) -> None:
            if not read_at(file, out, start):
                raise ChecksumMismatch(f"The file of '{spec.name}' was cut while it was read: publish it again.")
            for each in changes:
                each.apply(out, start)

        def fetch_any(out: memoryview, start: int) -> None:
            before, after = start % width, -(start + len(out)) % width
            if not changes or not before and not after:
                return fetch(out, start)
            elements = memoryview(bytearray(before + len(out) + after))
            fetch(elements, start - before)
            out[:] = elements[before : before + len(out)]

        yield fetch_any


@contextmanager
def _opened_file(lease: Lease, spec: TensorSpec) -> Iterator[int]:
    """Open the file of a tensor, which has the same name, dtype and shape in every step of a chain."""
    try:
        file = open_file(file_name(spec.name), dir_fd=lease.directory)
    except OSError as problem:
        raise ManifestMismatch(
            f"The file of '{spec.name}' cannot be used: {problem.strerror}. Publish again."
        ) from None
    try:
        if (size := os.fstat(file).st_size) != spec.num_bytes:
            what = f"has {size} bytes, the manifest says {spec.num_bytes}"
            version = lease.pointer.anchor.version
            raise ManifestMismatch(f"The file of '{spec.name}' {what}: publish version {version} again.")
        yield file
    finally:
        os.close(file)


def check_tensors(lease: Lease, specs: Sequence[TensorSpec], num_threads: int) -> None:
    """Read tensors of a lease, and raise `ChecksumMismatch` unless they have their digests."""
    files = [_published_tensor(lease, spec) for spec in specs]
    in_threads(FileTensor.piece_digests, files, num_threads, [spec.num_bytes for spec in specs])


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
