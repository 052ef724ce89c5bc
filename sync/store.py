"""The store transport: versions published as directories of tensors, read by any number of processes.

    publish:  versions/.staging (an old version without readers, or new) ── write, digest, fsync
              ── manifest.json ── rename to versions/000042 ── CURRENT replaced ── done

Killed anywhere before the last step, the old version is still current and whole. The layout on disk and the rules of
reading are in `sync.published`.
"""

import itertools
import os
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor

from sync.base import Metadata, WeightReceiver, WeightSender, WeightSource
from sync.buckets import Slot, view_of
from sync.digests import piece_digests, tensor_bytes
from sync.errors import StaleVersion, SyncError
from sync.manifest import TensorSpec, WeightManifest
from sync.offer import Offer
from sync.own_files import make_directories, open_directory, open_file, opened_directory, opened_file
from sync.owner_process import OwnerProcess
from sync.pieces import Lacking
from sync.published import (
    CURRENT,
    LEASE,
    LOCK,
    MANIFEST,
    META,
    VERSIONS,
    Lease,
    Pointer,
    check_file_names,
    checked_manifest,
    file_name,
    is_store,
    lease_current,
    meta_json,
    opened_tensor,
    read_pointer,
)
from sync.shared_files import open_sole, reserve, try_lock, write_at
from sync.source import NamedTensor, gathers_finished
from sync.tensor_check import CheckResult
from sync.tensor_writer import HOST_WRITER, TensorWriter
from sync.threads import in_threads, thread_count

_STAGING = ".staging"
_READ_WRITE = os.O_RDWR | os.O_CREAT


def publish(
    directory: str | os.PathLike[str],
    source: WeightSource,
    version: int,
    *,
    metadata: Metadata | None = None,
    reset_version: bool = False,
    num_threads: int = 1,
) -> WeightManifest:
    """Make `source` the current version of the store at `directory`, which is created if absent (mode 0700).

    Readers see the old version or the new one, whole, whatever happens to this process. On any error the old version
    stays current. The current version with the same weights is a no-op.

    Args:
        metadata: name -> (dtype, shape); floating tensors are cast to these dtypes. Default: as they are.
        reset_version: allow a version that is not higher (a trainer that restarted).
        num_threads: how many threads cast, digest and write.

    Raises `StaleVersion`; `ManifestMismatch` for tensors or names that cannot be published; `SyncError` when another
    publisher is at work, or the disk is full or refuses.
    """
    store = Path(directory)
    offer = Offer(source, metadata or {})
    with gathers_finished(offer.tensors), _sole_publisher(store):
        return _publish(store, offer, version, reset_version, num_threads)


class StoreSender(WeightSender):
    """Publishes each offer to the store at `directory`; the options are those of `publish`.

    It is the only publisher until closed: a second trainer on the same store is refused with `SyncError`.
    """

    def __init__(self, directory: str | os.PathLike[str], *, reset_version: bool = False, num_threads: int = 1) -> None:
        self._store, self._reset_version, self._num_threads = Path(directory), reset_version, num_threads
        self._owner = OwnerProcess()
        self._before: Pointer | None = None
        """The version that was current before the last offer."""
        self._lock = ExitStack()
        self._lock.enter_context(_sole_publisher(self._store))

    def offer(self, source: WeightSource, version: int, metadata: Metadata) -> WeightManifest:
        """Publish `source`; raises as `publish` does. `SyncError` in a forked child, which shares the parent's lock."""
        if not self._owner.is_current:
            raise SyncError(self._owner.error_message(f"The sender to {self._store}"))
        self._before = read_pointer(self._store) if is_store(self._store) else None
        return _publish(self._store, Offer(source, metadata), version, self._reset_version, self._num_threads)

    def send(self) -> None:
        """Do nothing: receivers read the published files."""

    def take_back(self) -> None:
        """Make the version before the last offer current again; no-op if nothing was, or nothing was offered."""
        if self._before is not None:
            _point_to(self._store, self._before)

    def close(self) -> None:
        """Let other publishers in; the published versions stay."""
        self._lock.close()


class StoreReceiver(WeightReceiver):
    """Reads versions from the store at `directory`, on `num_threads` threads.

    Files are read, not mapped: one that is cut meanwhile is an error, not the end of the process.
    """

    takes_part = True

    def __init__(self, directory: str | os.PathLike[str], *, num_threads: int = 1) -> None:
        self._directory, self._num_threads = Path(directory), num_threads

    def receive(self, manifest: WeightManifest) -> Iterator[NamedTensor]:
        """Yield each tensor, read ahead of the consumer. `SyncError` when another version is current in the store."""
        lease = self._lease_version(manifest)
        largest = max((spec.num_bytes for spec in manifest.tensors), default=0)
        specs = iter(manifest.tensors)
        ahead: deque[tuple[TensorSpec, Tensor, Future[None]]] = deque()
        num_threads = thread_count(self._num_threads, len(manifest.tensors))
        with ThreadPoolExecutor(num_threads) as pool:

            def read_next(buffer: Tensor) -> None:
                for spec in itertools.islice(specs, 1):
                    ahead.append((spec, buffer, pool.submit(_read, lease, spec, buffer)))

            for _ in range(num_threads + 1):
                read_next(torch.empty(largest, dtype=torch.uint8))
            while ahead:
                spec, buffer, reading = ahead.popleft()
                reading.result()
                yield spec.name, view_of(buffer, Slot(spec, 0))
                read_next(buffer)  # the consumer has asked for the next tensor, so it is done with this one

    def receive_into(
        self,
        shadow: Mapping[str, Tensor],
        manifest: WeightManifest,
        writer: TensorWriter = HOST_WRITER,
        lacking: Lacking | None = None,
    ) -> dict[str, CheckResult]:
        """Read each tensor straight to its place in `shadow`."""
        lease = self._lease_version(manifest)

        def read(spec: TensorSpec) -> CheckResult:
            out = shadow[spec.name]
            part = lacking[spec.name] if lacking else None
            with opened_tensor(lease, spec) as fetch:
                return writer.read(out, fetch) if part is None else writer.read_part(out, fetch, part)

        wanted = [spec for spec in manifest.tensors if lacking is None or spec.name in lacking]
        results = in_threads(read, wanted, self._num_threads, [spec.num_bytes for spec in wanted])
        return {spec.name: result for spec, result in zip(wanted, results, strict=True)}

    def _lease_version(self, manifest: WeightManifest) -> Lease:
        lease = lease_current(self._directory)
        current = checked_manifest(lease)
        if current != manifest:
            what = f"version {current.version} is current, not version {manifest.version} of that digest"
            raise SyncError(f"{self._directory}: {what}. Receive each version before the next is published.")
        return lease


def _read(lease: Lease, spec: TensorSpec, buffer: Tensor) -> None:
    with opened_tensor(lease, spec) as fetch:
        fetch(tensor_bytes(buffer)[: spec.num_bytes], 0)


@contextmanager
def _sole_publisher(store: Path) -> Iterator[None]:
    try:
        make_directories(store)
        lock = open_sole(store / LOCK)
    except OSError as problem:
        part = "" if problem.filename == os.fspath(store) else f" ({problem.filename})"
        raise SyncError(f"{store} cannot be published to{part}: {problem.strerror}.") from None
    try:
        yield
    finally:
        os.close(lock)


def _publish(store: Path, offer: Offer, version: int, reset_version: bool, num_threads: int) -> WeightManifest:
    """Publish `offer`; the caller is the sole publisher."""
    WeightManifest.of(version, offer.specs, offer.aliases).check()
    check_file_names(offer.specs)
    current = read_pointer(store) if is_store(store) else None
    if current is not None and not reset_version and version <= current.version:
        return _published_already(store, offer, version)
    try:
        make_directories(store / VERSIONS)
        with _staging(store / VERSIONS, keep=current.directory if current else None) as staging:
            manifest = _write_version(staging, offer, version, num_threads)
            _make_current(store, staging, manifest)
            return manifest
    except (OSError, RecursionError) as problem:
        kept = f"version {current.version} is still current" if current else "nothing is published yet"
        why = (
            f"{problem.strerror}" if isinstance(problem, OSError) else "directories are nested too deep to remove them"
        )
        raise SyncError(f"Publishing version {version} to {store} failed: {why}; {kept}.") from problem


def _published_already(store: Path, offer: Offer, version: int) -> WeightManifest:
    """The manifest on disk when it is this version of these weights; otherwise `StaleVersion`."""
    published = checked_manifest(lease_current(store))
    if published.version == version and published.is_same(offer.manifest_in_place(version)):
        return published
    same = version == published.version
    what = "is published with other weights" if same else f"is older than version {published.version}"
    raise StaleVersion(f"Version {version} {what} in {store}. Send a higher one, or reset_version=True.")


@contextmanager
def _staging(versions: Path, keep: str | None) -> Iterator[Path]:
    """Yield a directory to write the next version in, under an exclusive lease; it is removed on error.

    Rewriting the files of an old version is several times faster than making new ones, so one without readers is
    reused, and further ones are removed.
    """
    staging = versions / _STAGING
    lock = None
    try:
        for name in sorted(os.listdir(versions)):  # .staging, left by a publisher that died, sorts first
            if name == keep:
                continue
            if not _is_own_directory(versions / name):
                _remove(versions / name)
                continue
            free = _lock_unleased(versions / name)
            if free is None:
                continue
            if lock is None:
                lock = free
                os.rename(versions / name, staging)
            else:
                _remove(versions / name)
                os.close(free)
        if lock is None:
            staging.mkdir(mode=0o700)
            lock = _lock_unleased(staging)
        yield staging
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _lock_unleased(version: Path) -> int | None:
    """An exclusive lock on the version's lease, or None while a reader holds it."""
    if not _is_own_file(version / LEASE):
        _remove(version / LEASE)
    lock = open_file(version / LEASE, _READ_WRITE)
    if try_lock(lock):
        return lock
    os.close(lock)
    return None


def _is_own_directory(path: Path) -> bool:
    try:
        os.close(open_directory(path))
    except OSError:
        return False
    return True


def _is_own_file(path: Path) -> bool:
    try:
        os.close(open_file(path))
    except OSError:
        return False
    return True


def _remove(path: Path) -> None:
    """Remove the file, link or tree at a path; the target of a link stays."""
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            os.unlink(path)


def _write_version(staging: Path, offer: Offer, version: int, num_threads: int) -> WeightManifest:
    wanted = {file_name(spec.name) for spec in offer.specs}
    for name in os.listdir(staging):
        if name != LEASE and not (name in wanted and _is_own_file(staging / name)):
            _remove(staging / name)
    for spec in offer.specs:  # reserves all space before the first byte is written
        _allocate(staging / file_name(spec.name), spec.num_bytes)

    def write(i: int) -> list[bytes]:
        tensor = offer.cast(i).cpu().contiguous()
        _write_file(staging / file_name(offer.specs[i].name), tensor_bytes(tensor))
        return piece_digests(tensor)

    manifest = offer.manifest(version, write, num_threads)
    _write_file(staging / META, meta_json(manifest))
    _write_file(staging / MANIFEST, msgspec.json.encode(manifest))
    _sync_directory(staging)
    return manifest


def _make_current(store: Path, staging: Path, manifest: WeightManifest) -> None:
    """Make `staging` the current version, by two renames. All that needs space on the disk is done before them."""
    versions, plain = staging.parent, f"{manifest.version:06d}"
    names = itertools.chain([plain], (f"{plain}-{i}" for i in itertools.count(1)))
    name = next(name for name in names if not os.path.lexists(versions / name))
    digest = xxhash.xxh3_128_hexdigest(msgspec.json.encode(manifest))
    fresh = _write_pointer(store, Pointer(manifest.version, name, digest))
    os.rename(staging, versions / name)
    _sync_directory(versions)
    os.replace(fresh, store / CURRENT)
    _sync_directory(store)


def _point_to(store: Path, pointer: Pointer) -> None:
    """Make a version directory that is there the current one."""
    os.replace(_write_pointer(store, pointer), store / CURRENT)
    _sync_directory(store)


def _write_pointer(store: Path, pointer: Pointer) -> Path:
    """Write the file that will replace CURRENT."""
    fresh = store / f"{CURRENT}.new"
    _remove(fresh)
    _write_file(fresh, msgspec.json.encode(pointer))
    return fresh


def _allocate(path: Path, num_bytes: int) -> None:
    with opened_file(path, _READ_WRITE) as file:
        if os.fstat(file).st_size > num_bytes:
            os.ftruncate(file, num_bytes)
        reserve(file, num_bytes)


def _write_file(path: Path, content: memoryview | bytes) -> None:
    with opened_file(path, _READ_WRITE) as file:
        write_at(file, content, 0)
        os.fsync(file)


def _sync_directory(path: Path) -> None:
    with opened_directory(path) as directory:
        os.fsync(directory)
