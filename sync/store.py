"""The store transport: versions published as directories of tensors, read by any number of processes.

    publish:  versions/.staging (an old version without readers, or new) ── write, digest, fsync
              ── manifest.json ── rename to versions/000042 ── CURRENT replaced ── done
    delta:    the same, with the changes against the current version in place of whole tensors, if they have its form;
              every `anchor_every` versions a whole one, the anchor of the next

Killed anywhere before the last step, the old version is still current and whole. The layout on disk and the rules of
reading are in `sync.published`.
"""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor

from sync.base import Metadata, WeightReceiver, WeightSender, WeightSource
from sync.buckets import Slot, view_of
from sync.digests import piece_digests, tensor_bytes
from sync.errors import StaleVersion, SyncError
from sync.lease import Lease, lease_current
from sync.link_writer import DeltaBase, LinkWriter
from sync.manifest import TensorSpec, WeightManifest
from sync.offer import Offer
from sync.own_files import make_directories
from sync.owner_process import OwnerProcess
from sync.pieces import Lacking
from sync.pointer import CURRENT, LEASE, LOCK, MANIFEST, MAX_LINKS, META, VERSIONS, Pointer, is_store, read_pointer
from sync.published import check_file_names, checked_manifest, file_name, meta_json, opened_tensor
from sync.shared_files import open_sole
from sync.source import NamedTensor, gathers_finished
from sync.staging import allocate, is_own_file, remove, staging_directory, sync_directory, write_file
from sync.tensor_check import CheckResult
from sync.tensor_writer import HOST_WRITER, TensorWriter
from sync.threads import in_threads, thread_count


def publish(
    directory: str | os.PathLike[str],
    source: WeightSource,
    version: int,
    *,
    metadata: Metadata | None = None,
    reset_version: bool = False,
    num_threads: int = 1,
    delta: bool = False,
    anchor_every: int = 16,
) -> WeightManifest:
    """Make `source` the current version of the store at `directory`, which is created if absent (mode 0700).

    Readers see the old version or the new one, whole, whatever happens to this process. On any error the old version
    stays current. The current version with the same weights is a no-op.

    Args:
        metadata: name -> (dtype, shape); floating tensors are cast to these dtypes. Default: as they are.
        reset_version: allow a version that is not higher (a trainer that restarted).
        num_threads: how many threads cast, digest and write.
        delta: write the elements that changed since the current version alone. The first version is whole, and so is
            one of other names, dtypes, shapes or ties, one that follows changes of half of all bytes, one that is not
            higher, and one whose current version is damaged. Readers need no option.
        anchor_every: with `delta`, one version in this number is whole (an anchor), from 1 to 257.

    Raises `StaleVersion`; `ManifestMismatch` for tensors or names that cannot be published; `SyncError` when another
    publisher is at work, or the disk is full or refuses.
    """
    store = Path(directory)
    every = _check_anchors(delta, anchor_every)
    offer = Offer(source, metadata or {})
    with gathers_finished(offer.tensors), sole_publisher(store):
        return _publish(store, offer, version, reset_version, num_threads, every)


def publish_whole(store: Path, source: WeightSource, version: int, num_threads: int) -> WeightManifest:
    """Publish a whole version in place of any that is current; the caller is the `sole_publisher`."""
    return _publish(store, Offer(source, {}), version, True, num_threads, 1)


class StoreSender(WeightSender):
    """Publishes each offer to the store at `directory`; the options are those of `publish`.

    It is the only publisher until closed: a second trainer on the same store is refused with `SyncError`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        reset_version: bool = False,
        num_threads: int = 1,
        delta: bool = False,
        anchor_every: int = 16,
    ) -> None:
        self._store, self._reset_version, self._num_threads = Path(directory), reset_version, num_threads
        self._anchor_every = _check_anchors(delta, anchor_every)
        self._owner = OwnerProcess()
        self._before: Pointer | None = None
        """The version that was current before the last offer."""
        self._lock = ExitStack()
        self._lock.enter_context(sole_publisher(self._store))

    def offer(self, source: WeightSource, version: int, metadata: Metadata) -> WeightManifest:
        """Publish `source`; raises as `publish` does. `SyncError` in a forked child, which shares the parent's lock."""
        if not self._owner.is_current:
            raise SyncError(self._owner.error_message(f"The sender to {self._store}"))
        self._before = read_pointer(self._store) if is_store(self._store) else None
        offer = Offer(source, metadata)
        return _publish(self._store, offer, version, self._reset_version, self._num_threads, self._anchor_every)

    def send(self) -> None:
        """Do nothing: receivers read the published files."""

    def take_back(self) -> None:
        """Make the version before the last offer current again; no-op if nothing was, or nothing was offered."""
        if self._before is not None:
            point_to(self._store, self._before)

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
        lease = lease_current(self._directory, log=False)
        current = checked_manifest(lease)
        if current != manifest:
            what = f"version {current.version} is current, not version {manifest.version} of that digest"
            what = lease.problem or f"{self._directory}: {what}."
            raise SyncError(f"{what} Receive each version before the next is published.")
        return lease


def _read(lease: Lease, spec: TensorSpec, buffer: Tensor) -> None:
    with opened_tensor(lease, spec) as fetch:
        fetch(tensor_bytes(buffer)[: spec.num_bytes], 0)


@contextmanager
def sole_publisher(store: Path) -> Iterator[None]:
    """Hold the lock of a store's one publisher. `SyncError` if another holds it, or nothing can be written there."""
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


def _check_anchors(delta: bool, anchor_every: int) -> int:
    """How many versions there are for each whole one. `SyncError` for a number that is not allowed."""
    if type(anchor_every) is not int or not 1 <= anchor_every <= MAX_LINKS + 1:
        raise SyncError(f"anchor_every={anchor_every!r} is not allowed: must be an int in [1, {MAX_LINKS + 1}].")
    return anchor_every if delta else 1


def _publish(
    store: Path, offer: Offer, version: int, reset_version: bool, num_threads: int, anchor_every: int
) -> WeightManifest:
    """Publish `offer`; the caller is the sole publisher."""
    WeightManifest.of(version, offer.specs, offer.aliases).check()
    check_file_names(offer.specs)
    current = read_pointer(store) if is_store(store) else None
    if current is not None and not reset_version and version <= current.version:
        lease = lease_current(store)
        if not lease.problem or version < current.version:
            return _published_already(store, lease, offer, version)
    grows = current is not None and version > current.version  # a chain has each version once
    base = DeltaBase.find(store, offer) if grows and anchor_every > 1 else None
    is_link = base is not None and base.takes_link(anchor_every)
    kept = {step.directory for step in current.steps} if current else ()
    try:
        make_directories(store / VERSIONS)
        with staging_directory(store / VERSIONS, kept, recycle=not is_link) as staging:
            if base is not None and current is not None and is_link:
                manifest, pointer = _write_link(staging, offer, version, num_threads, base, current)
            else:
                manifest, pointer = _write_anchor(staging, offer, version, num_threads, base)
            _make_current(store, staging, pointer)
            return manifest
    except (OSError, RecursionError) as problem:
        kept_version = f"version {current.version} is still current" if current else "nothing is published yet"
        why = (
            f"{problem.strerror}" if isinstance(problem, OSError) else "directories are nested too deep to remove them"
        )
        raise SyncError(f"Publishing version {version} to {store} failed: {why}; {kept_version}.") from problem


def _published_already(store: Path, lease: Lease, offer: Offer, version: int) -> WeightManifest:
    """The manifest on disk when it is this version of these weights; otherwise `StaleVersion`."""
    published = checked_manifest(lease)
    if published.version == version and published.is_same(offer.manifest_in_place(version)):
        return published
    same = version == published.version
    what = "is published with other weights" if same else f"is older than version {published.version}"
    raise StaleVersion(f"Version {version} {what} in {store}. Send a higher one, or reset_version=True.")


def _write_anchor(
    staging: Path, offer: Offer, version: int, num_threads: int, base: DeltaBase | None
) -> tuple[WeightManifest, Pointer]:
    """Write all tensors whole, and the changes against `base` for copies elsewhere that have it (`sync.store_pull`)."""
    wanted = {file_name(spec.name) for spec in offer.specs}
    for name in os.listdir(staging):
        if name != LEASE and not (name in wanted and is_own_file(staging / name)):
            remove(staging / name)
    for spec in offer.specs:  # reserves all space before the first byte is written
        allocate(staging / file_name(spec.name), spec.num_bytes)
    link = LinkWriter(staging, base) if base is not None and base.is_sparse else None

    def write(i: int) -> list[bytes]:
        tensor = offer.cast(i).cpu().contiguous()
        write_file(staging / file_name(offer.specs[i].name), tensor_bytes(tensor))
        pieces = piece_digests(tensor)
        if link is not None:
            link.add(offer.specs[i].name, tensor, pieces)
        return pieces

    manifest, digest, _ = _write_manifest(staging, offer, version, num_threads, write, link)
    write_file(staging / META, meta_json(manifest))
    sync_directory(staging)
    return manifest, Pointer(version, staging.name, digest)


def _write_link(
    staging: Path, offer: Offer, version: int, num_threads: int, base: DeltaBase, current: Pointer
) -> tuple[WeightManifest, Pointer]:
    """Write the changes against `base`, the version of `current`."""
    link = LinkWriter(staging, base)

    def write(i: int) -> list[bytes]:
        tensor = offer.cast(i).cpu().contiguous()
        pieces = piece_digests(tensor)
        link.add(offer.specs[i].name, tensor, pieces)
        return pieces

    manifest, digest, content = _write_manifest(staging, offer, version, num_threads, write, link)
    sync_directory(staging)
    return manifest, current.link_to(version, staging.name, digest, xxhash.xxh3_128_hexdigest(content))


def _write_manifest(
    staging: Path,
    offer: Offer,
    version: int,
    num_threads: int,
    write: Callable[[int], list[bytes]],
    link: LinkWriter | None,
) -> tuple[WeightManifest, str, bytes]:
    """Write all tensors, then the manifest and the link; returns it, the digest of its bytes, and those of the link."""
    try:
        manifest = offer.manifest(version, write, num_threads)
        content = msgspec.json.encode(manifest)
        digest = xxhash.xxh3_128_hexdigest(content)
        write_file(staging / MANIFEST, content)
        return manifest, digest, b"" if link is None else link.finish(version, digest)
    finally:
        if link is not None:
            link.close()


def _make_current(store: Path, staging: Path, pointer: Pointer) -> None:
    """Make `staging` the version of `pointer`, and that the current one, by two renames.

    All that needs space on the disk is done before them.
    """
    name = free_name(staging.parent, pointer.version)
    fresh = _write_pointer(store, msgspec.structs.replace(pointer, directory=name))
    place_version(staging, name)
    os.replace(fresh, store / CURRENT)
    sync_directory(store)


def place_version(staging: Path, name: str) -> None:
    """Give a directory in which a version has been written its name."""
    os.rename(staging, staging.parent / name)
    sync_directory(staging.parent)


def free_name(versions: Path, version: int) -> str:
    """The name of the directory of a new version."""
    plain = f"{version:06d}"
    names = itertools.chain([plain], (f"{plain}-{i}" for i in itertools.count(1)))
    return next(name for name in names if not os.path.lexists(versions / name))


def point_to(store: Path, pointer: Pointer) -> None:
    """Make a version directory that is there the current one."""
    os.replace(_write_pointer(store, pointer), store / CURRENT)
    sync_directory(store)


def _write_pointer(store: Path, pointer: Pointer) -> Path:
    """Write the file that will replace CURRENT."""
    fresh = store / f"{CURRENT}.new"
    remove(fresh)
    write_file(fresh, msgspec.json.encode(pointer))
    return fresh
