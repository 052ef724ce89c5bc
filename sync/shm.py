"""The shared-memory transport: another process of the same user on the same machine.

    trainer's memory     [ header, one page | tensor | pad | tensor | ... ]    one bucket of `sync.buckets`
    DIRECTORY/weights    the process that has this memory, and its descriptor there

The trainer casts straight into the mapping, once; engines read views of it. Both keep it mapped from update to update
(fresh pages cost several times a copy). The memory has no name in any directory and is sealed: it may grow and cannot
shrink, so that no access to a mapping of it fails. It ends with the trainer's process. Only this user may enter
DIRECTORY.
"""

import errno
import fcntl
import itertools
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import psutil
import torch
from torch import Tensor

from sync.base import Metadata, WeightReceiver, WeightSender, WeightSource
from sync.buckets import one_bucket, view_of
from sync.errors import ChecksumMismatch, SyncError
from sync.manifest import WeightManifest
from sync.offer import Offer
from sync.own_files import read_small
from sync.pieces import Lacking
from sync.shared_files import check_private, make_private, open_sole, reserve
from sync.source import NamedTensor
from sync.tensor_check import CheckResult
from sync.tensor_writer import HOST_WRITER, TensorWriter, Written
from sync.threads import in_threads

_FILE = "weights"
_HEADER_BYTES = 4096


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    """The version in the mapping. Zeros stand in its place while the mapping is being written."""

    version: int
    digest: str


class _Announcement(msgspec.Struct, forbid_unknown_fields=True):
    """The content of DIRECTORY/weights: where engines find the memory."""

    pid: int
    descriptor: int
    inode: int


class ShmSender(WeightSender):
    """Writes each offer to shared memory that is announced in `directory`, which is created if absent (mode 0700).

    It is the only sender there until closed; a second one is refused with `SyncError`, and so is a directory that
    others can enter, and a system without sealed memory (which Linux has).

    Args:
        num_threads: how many threads cast, copy and digest.
        writer: copies tensors into shared memory.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, num_threads: int = 1, writer: TensorWriter = HOST_WRITER
    ) -> None:
        self._path = Path(directory) / _FILE
        self._num_threads, self._writer = num_threads, writer
        if not hasattr(os, "memfd_create"):
            raise SyncError("This system has no sealed memory to share (Linux has): send by 'store' or 'gloo'.")
        try:
            make_private(self._path.parent)
            self._file = open_sole(self._path)
        except OSError as problem:
            what = f"Shared memory cannot be opened: {problem.filename}: {problem.strerror}"
            raise SyncError(f"{what}.") from None
        self._memory = os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self._memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._mapping: mmap.mmap | None = None
        self._written: dict[tuple[int, int], Written] = {}
        """Digests of the content, by the first byte and the number of bytes of each tensor."""

    def offer(self, source: WeightSource, version: int, metadata: Metadata) -> WeightManifest:
        """Write to shared memory those parts of `source` that differ from the last offer, piece by piece.

        `SyncError` when there is no room; the last version is then gone as well.
        """
        offer = Offer(source, metadata)
        WeightManifest.of(version, offer.specs, offer.aliases).check()
        bucket = one_bucket(offer.specs)
        mapping = self._grown_to(_HEADER_BYTES + bucket.num_bytes)
        _write_header(mapping, None)
        content = _content(mapping, bucket.num_bytes)
        known, self._written = self._written, {}
        written: dict[tuple[int, int], Written] = {}

        def write(i: int) -> list[bytes]:
            slot = bucket.slots[i]
            place = slot.start, slot.spec.num_bytes
            found = offer.write_changed(i, view_of(content, slot), self._writer, known.get(place))
            if found.digests:  # else it shares its place with the next one
                written[place] = found
            return found.digests

        manifest = offer.manifest(version, write, self._num_threads)
        self._written = written
        _write_header(mapping, _Header(version, manifest.digest))
        self._announce()
        return manifest

    def forget(self) -> None:
        self._written = {}

    def close(self) -> None:
        """Remove the announcement; receivers keep their mappings. No-op the second time."""
        if self._file >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            os.close(self._memory)
            self._file, self._mapping = -1, None

    def _announce(self) -> None:
        """Write the file anew, whatever became of it since the last offer."""
        content = msgspec.json.encode(_Announcement(os.getpid(), self._memory, os.fstat(self._memory).st_ino))
        os.pwrite(self._file, content, 0)
        os.ftruncate(self._file, len(content))

    def _grown_to(self, num_bytes: int) -> mmap.mmap:
        if self._file < 0:
            raise SyncError("This sender is closed: make another one.")
        size = os.fstat(self._memory).st_size
        if size < num_bytes:
            try:
                if num_bytes - size > psutil.virtual_memory().available:
                    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
                reserve(self._memory, num_bytes)
            except OSError as problem:
                what = f"No room for {num_bytes} bytes of weights in shared memory: {problem.strerror}"
                raise SyncError(f"{what}. Free some, or send by 'store'.") from None
        if self._mapping is None or len(self._mapping) < num_bytes:
            self._mapping = mmap.mmap(self._memory, max(size, num_bytes))
        return self._mapping


class ShmReceiver(WeightReceiver):
    """Reads the tensors that a `ShmSender` of the same user announces in `directory`. Tensors are views of the mapping.

    Args:
        num_threads: how many threads `receive_into` copies and digests on.
    """

    takes_part = True

    def __init__(self, directory: str | os.PathLike[str], *, num_threads: int = 1) -> None:
        self._path = Path(directory) / _FILE
        self._num_threads = num_threads
        self._mapping: mmap.mmap | None = None
        self._inode = -1

    def receive(self, manifest: WeightManifest) -> Iterator[NamedTensor]:
        """Yield views of the mapping. `SyncError` when no sender, or another version, is there; `ChecksumMismatch` when
        it was overwritten meanwhile."""
        manifest.check()
        bucket = one_bucket(manifest.tensors)
        mapping = self._map_memory(_HEADER_BYTES + bucket.num_bytes)
        wanted = _Header(manifest.version, manifest.digest)
        if (found := _read_header(mapping)) != wanted:
            what = "nothing complete" if found is None else f"version {found.version}"
            raise SyncError(
                f"Shared memory holds {what}, not version {manifest.version} of the manifest: offer it again."
            )
        yield from bucket.views(_content(mapping, bucket.num_bytes))
        if _read_header(mapping) != wanted:
            raise ChecksumMismatch(f"Version {manifest.version} was overwritten while it was received: offer it again.")

    def receive_into(
        self,
        shadow: Mapping[str, Tensor],
        manifest: WeightManifest,
        writer: TensorWriter = HOST_WRITER,
        lacking: Lacking | None = None,
    ) -> dict[str, CheckResult]:
        views = self.receive(manifest)
        every = itertools.islice(views, len(manifest.tensors))
        tensors = {name: tensor for name, tensor in every if lacking is None or name in lacking}

        def write(name: str) -> CheckResult:
            part = lacking[name] if lacking else None
            if part is not None:
                return writer.write_part(shadow[name], tensors[name], part)
            return writer.write(shadow[name], tensors[name])

        sizes = [tensor.nbytes for tensor in tensors.values()]
        results = in_threads(write, tensors, self._num_threads, sizes)
        list(views)  # checks that it was not overwritten meanwhile
        return dict(zip(tensors, results, strict=True))

    def close(self) -> None:
        """Release the mapping; it ends with the last tensor that is a view of it."""
        self._mapping, self._inode = None, -1

    def _map_memory(self, num_bytes: int) -> mmap.mmap:
        """The mapping of at least `num_bytes`, made anew when the memory has grown or belongs to another sender."""
        memory = self._open_memory()
        try:
            status = os.fstat(memory)
            if status.st_size < num_bytes:
                raise SyncError(f"Shared memory has {status.st_size} bytes; the manifest needs {num_bytes}.")
            if self._mapping is None or self._inode != status.st_ino or len(self._mapping) < num_bytes:
                self._mapping = mmap.mmap(memory, status.st_size, flags=mmap.MAP_PRIVATE)
                self._inode = status.st_ino
        except (OSError, OverflowError) as problem:
            raise SyncError(f"The sender's memory cannot be mapped: {problem}.") from None
        finally:
            os.close(memory)
        return self._mapping

    def _open_memory(self) -> int:
        """A descriptor of the announced memory, after a check that it is this user's and sealed."""
        try:
            check_private(self._path.parent)
            announced = msgspec.json.decode(read_small(self._path, _HEADER_BYTES), type=_Announcement)
        except OSError as problem:
            what = f"No sender offers weights in shared memory: {problem.filename}: {problem.strerror}"
            raise SyncError(f"{what}. Offer them again.") from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise SyncError(f"{self._path} announces no weights: offer them again.") from None
        try:
            memory = os.open(f"/proc/{announced.pid}/fd/{announced.descriptor}", os.O_RDONLY | os.O_NONBLOCK)
        except OSError as problem:
            what = f"The sender's memory (process {announced.pid}) cannot be opened: {problem.strerror}"
            raise SyncError(f"{what}. It has ended, or runs in another container: there, send by 'store'.") from None
        status = os.fstat(memory)
        if status.st_uid != os.geteuid() or status.st_ino != announced.inode or not _is_sealed(memory):
            os.close(memory)
            raise SyncError("Shared memory for weights is not what was announced: offer the weights again.")
        return memory


def _is_sealed(memory: int) -> bool:
    """Whether the memory cannot shrink."""
    try:
        return bool(fcntl.fcntl(memory, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # a kind of file that has no seals
        return False


def _content(mapping: mmap.mmap, num_bytes: int) -> Tensor:
    """The bytes after the header, uint8 [num_bytes]."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=_HEADER_BYTES, count=num_bytes)


def _write_header(mapping: mmap.mmap, header: _Header | None) -> None:
    """Write the header. The length is cleared first and set last, so a header is there wholly or not at all."""
    mapping[:8] = bytes(8)
    if header is not None:
        content = msgspec.msgpack.encode(header)
        mapping[8 : 8 + len(content)] = content
        mapping[:8] = len(content).to_bytes(8, "little")


def _read_header(mapping: mmap.mmap) -> _Header | None:
    length = int.from_bytes(mapping[:8], "little")
    if not 0 < length <= _HEADER_BYTES - 8:
        return None
    try:
        return msgspec.msgpack.decode(mapping[8 : 8 + length], type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
