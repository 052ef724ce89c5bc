"""A link of a store's chain: a version as its changes against the version before it.

    versions/000043/
      manifest.json    of the whole version: every tensor with its digest
      link.json        the version before, and the place of each tensor's changes
      changes          the changes of all changed tensors, in the form of `sync.changes`
      lease            as of a whole version

CURRENT has the digests of manifest.json and link.json of every step, and link.json that of `changes`, and the one of
the manifest below it: a link that is torn, of another store or in another place is found before it is used.
"""

import os
from collections.abc import Mapping, Sequence

import msgspec
import xxhash

from sync.changes import Changes, decode_changes, num_streams
from sync.errors import ChecksumMismatch, ManifestMismatch
from sync.manifest import TensorSpec, decode_json, first_names, torch_dtype
from sync.own_files import open_file, read_small
from sync.pointer import CHANGES, LEASE, LINK, MANIFEST, Pointer
from sync.shared_files import read_at

MAX_JSON_BYTES = 2**28
_READ_BYTES = 1 << 20
FILES = frozenset((MANIFEST, LINK, CHANGES, LEASE))
"""The files of a link's directory."""


class TensorChanges(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place of a tensor's changes in the file."""

    name: str
    count: int
    """Changed elements."""
    start: int
    """First byte in the file."""
    lengths: tuple[int, ...]
    """Bytes of each stream, one after the other."""


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of link.json. It has no names of directories, so a copy of a store has the same one."""

    version: int
    manifest_digest: str
    """xxh3-128 of the bytes of this version's manifest.json."""
    base_version: int
    base_digest: str
    """xxh3-128 of the bytes of manifest.json of the version that is changed."""
    num_bytes: int
    """Bytes of the file of changes."""
    checksum: str
    """xxh3-128 of them."""
    tensors: tuple[TensorChanges, ...] = ()
    """Changed tensors; all others are as before."""

    def follows(self, base: Pointer) -> bool:
        """Whether these are changes of that version."""
        return (self.base_version, self.base_digest) == (base.version, base.manifest_digest)


class OpenLink:
    """A link whose files have been checked. It keeps the descriptor that it is read by, not the lease."""

    def __init__(self, directory: int, step: Pointer, base: Pointer) -> None:
        """`directory`: an open descriptor. Raises `ManifestMismatch` or `ChecksumMismatch`, naming the file."""
        self.directory = directory
        self.where = f"versions/{step.directory}"
        self._file = -1
        self.manifest = _read_checked(directory, MANIFEST, self.where, step.manifest_digest)
        self.content = _read_checked(directory, LINK, self.where, step.link_digest)
        self.link = decode_json(self.content, Link, f"{self.where}/{LINK} is not valid")
        is_own = (self.link.version, self.link.manifest_digest) == (step.version, step.manifest_digest)
        if not is_own or not self.link.follows(base):
            came = f"changes version {self.link.base_version} into {self.link.version}"
            expected = f"expected version {base.version} into {step.version}"
            raise ManifestMismatch(f"{self.where}/{LINK} {came}, of other weights or in another order; {expected}.")
        check_directory(directory, FILES, self.where)
        try:
            self._file = open_file(CHANGES, dir_fd=directory)
        except OSError as problem:
            raise ManifestMismatch(f"{self.where}/{CHANGES} cannot be used: {problem.strerror}.") from None
        check_changes(self._file, self.link, f"{self.where}/{CHANGES}")
        self._by_name = {changes.name: changes for changes in self.link.tensors}

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def decode(self, spec: TensorSpec) -> Changes | None:
        """The changes of a tensor; None if it has none. Raises `ChecksumMismatch`."""
        changes = self._by_name.get(spec.name)
        return None if changes is None else read_changes(self._file, changes, spec, f"{self.where}/{CHANGES}")

    def fetch(self, out: memoryview, start: int) -> None:
        """Fill `out` with bytes of the file of changes."""
        if not read_at(self._file, out, start):
            raise ChecksumMismatch(f"{self.where}/{CHANGES} was cut while it was read.")


def read_changes(file: int, changes: TensorChanges, spec: TensorSpec, where: str) -> Changes:
    """Read and decode a tensor's changes from an open file. Raises `ChecksumMismatch`, naming the file `where`."""
    width = torch_dtype(spec.dtype).itemsize
    num_elements = spec.num_bytes // width
    try:
        is_sound = 0 <= changes.count <= num_elements and all(length >= 0 for length in changes.lengths)
        if not is_sound or len(changes.lengths) != num_streams(changes.count, num_elements, width):
            raise ChecksumMismatch(f"{changes.count} changes in {len(changes.lengths)} streams do not fit its shape")
        memory = memoryview(bytearray(sum(changes.lengths)))
        if not read_at(file, memory, changes.start):
            raise ChecksumMismatch("the file is shorter")
        return decode_changes(_split(memory, changes.lengths), changes.count, num_elements, width)
    except ChecksumMismatch as problem:
        raise ChecksumMismatch(f"{where}: the changes of '{spec.name}' cannot be used: {problem}.") from None


def check_changes(file: int, link: Link, where: str) -> None:
    """Raise `ChecksumMismatch` unless an open file holds the changes of `link`."""
    size = os.fstat(file).st_size
    if size != link.num_bytes:
        raise ChecksumMismatch(f"{where} has {size} bytes, expected {link.num_bytes}: it is torn.")
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(size, _READ_BYTES)))
    for start in range(0, size, _READ_BYTES):
        part = buffer[: size - start]
        if not read_at(file, part, start):
            raise ChecksumMismatch(f"{where} was cut while it was read.")
        digest.update(part)
    if digest.hexdigest() != link.checksum:
        raise ChecksumMismatch(f"{where} has checksum {digest.hexdigest()}, expected {link.checksum}: it is torn.")
    if any(not 0 <= changes.start <= size - sum(changes.lengths) for changes in link.tensors):
        raise ChecksumMismatch(f"{where} is shorter than the changes that {LINK} lists.")


def check_directory(directory: int, wanted: frozenset[str], where: str) -> None:
    """Raise `ManifestMismatch` unless an open directory has exactly these files."""
    found = set(os.listdir(directory))
    if found != wanted:
        extra, missing = sorted(found - wanted), sorted(wanted - found)
        lists = (("extra", extra), ("missing", missing))
        parts = [f"{len(names)} {kind}: {first_names(names)}" for kind, names in lists if names]
        raise ManifestMismatch(f"{where} has other files than those of a link ({'; '.join(parts)}).")


def base_bytes(links: Sequence[OpenLink]) -> int:
    """Bytes of the changes of several links."""
    return sum(link.link.num_bytes for link in links)


def same_forms(specs: Sequence[TensorSpec], others: Mapping[str, TensorSpec]) -> bool:
    """Whether both have the same names, dtypes and shapes."""
    forms = {spec.name: (spec.dtype, spec.shape) for spec in specs}
    return forms == {name: (spec.dtype, spec.shape) for name, spec in others.items()}


def _read_checked(directory: int, name: str, where: str, digest: str) -> bytes:
    try:
        content = read_small(name, MAX_JSON_BYTES, dir_fd=directory)
    except OSError as problem:
        raise ManifestMismatch(f"{where}/{name} cannot be used: {problem.strerror}.") from None
    found = xxhash.xxh3_128_hexdigest(content)
    if found != digest:
        raise ChecksumMismatch(f"{where}/{name} is not the one published: expected digest {digest}, found {found}.")
    return content


def _split(memory: memoryview, lengths: Sequence[int]) -> list[memoryview]:
    parts, start = [], 0
    for length in lengths:
        parts.append(memory[start : start + length])
        start += length
    return parts
