"""Leases of the current version: its directories, open and locked, so that no publisher recycles them.

    lease    CURRENT ── lock (shared) and open every step of its chain ── check the links ── CURRENT as before? ── done

A reader that has locked all steps, and then finds CURRENT as it was, keeps them: publishers leave alone the steps
of CURRENT, and all that are locked. If a link is torn, missing or of another chain, the anchor, which is whole, is read
in its place.
"""

import logging
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import TypeAlias

import msgspec

from sync.changes import Changes
from sync.errors import StaleVersion, SyncError, TransferTimeout
from sync.link import OpenLink
from sync.manifest import TensorSpec
from sync.own_files import open_directory, open_file, opened_directory
from sync.pointer import LEASE, VERSIONS, Pointer, read_pointer, unusable
from sync.shared_files import try_lock

logger = logging.getLogger("sync")

FileStates: TypeAlias = tuple[tuple[str, int, int, int, int], ...]
"""The name, number and size of each file, and the times of its contents and of its entry, in nanoseconds."""
_LEASE_SECONDS = 10.0
_MAX_DECODED = 32
"""Tensors whose decoded changes are kept: several threads each read one, piece by piece."""


class HeldDirectory:
    """An open directory of a version, under a shared lock; both end with this object."""

    def __init__(self, directory: int, lock: int) -> None:
        self.directory, self._lock = directory, lock

    def __del__(self) -> None:
        os.close(self._lock)
        os.close(self.directory)


class Lease:
    """The directories of one version; their shared locks end when this object does. Several threads may read."""

    def __init__(self, pointer: Pointer, held: list[HeldDirectory], links: list[OpenLink], problem: str = "") -> None:
        self.pointer, self.links = pointer, links
        self.problem = problem
        """Why this is not the version of CURRENT but its anchor; empty if it is."""
        self._held = held
        self._decoded: OrderedDict[str, list[Changes]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def directory(self) -> int:
        """Descriptor of the directory with whole tensors."""
        return self._held[0].directory

    def changes(self, spec: TensorSpec) -> list[Changes]:
        """The changes of a tensor, in the order of the links. Raises `ChecksumMismatch`."""
        if not self.links:
            return []
        with self._lock:
            if spec.name in self._decoded:
                self._decoded.move_to_end(spec.name)
                return self._decoded[spec.name]
        found = [changes for link in self.links if (changes := link.decode(spec)) is not None]
        with self._lock:
            self._decoded[spec.name] = found
            if len(self._decoded) > _MAX_DECODED:
                self._decoded.popitem(last=False)
        return found

    def file_states(self) -> "FileStates":
        """Sizes, times and numbers of all files that it reads: others once one of them was written or replaced."""
        files = [(one.directory, name) for one in self._held for name in sorted(os.listdir(one.directory))]
        found = [(name, os.stat(name, dir_fd=directory, follow_symlinks=False)) for directory, name in files]
        return tuple((name, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for name, each in found)

    def at(self, version: int) -> "Lease | None":
        """The same lease on a step of the chain; None if it has none of that version."""
        for i, step in reversed([*enumerate(self.pointer.steps)]):  # the newest, if a trainer went back to a number
            if step.version == version:
                pointer = msgspec.structs.replace(step, before=self.pointer.steps[:i])
                return Lease(pointer, self._held[: i + 1], self.links[:i])
        return None

    def require_version(self, live_version: int) -> None:
        """Raise `StaleVersion` if an engine's version is newer than the anchor that is read for a damaged link."""
        if self.problem and self.pointer.version < live_version:
            older = f"The anchor, version {self.pointer.version}, is older than version {live_version}, which is live"
            raise StaleVersion(f"{self.problem} {older}. Publish again.")


def lease_current(directory: Path, *, log: bool = True) -> Lease:
    """Lease the version that CURRENT names, whatever publishers do meanwhile; its anchor if a link is damaged.

    `log`: log a warning in that case. Raises `ManifestMismatch` if this is no store, or neither can be opened;
    `TransferTimeout` if versions are replaced faster than this reader can lease one, for ten seconds.
    """
    deadline = time.monotonic() + _LEASE_SECONDS
    while time.monotonic() < deadline:
        pointer = read_pointer(directory)
        try:
            lease = _try_lease(directory, pointer)
        except SyncError:
            if read_pointer(directory) == pointer:
                raise
            continue
        # Leased and still current: from here on no publisher recycles it.
        if lease is not None and read_pointer(directory) == pointer:
            if lease.problem and log:
                logger.warning("%s Version %d, its anchor, is read instead.", lease.problem, lease.pointer.version)
            return lease
        time.sleep(0.001)
    what = f"{directory}: no lease within {_LEASE_SECONDS:g} s"
    raise TransferTimeout(f"{what}: versions are published faster than readers can lease them. Publish less often.")


def lease_chain(directory: Path, pointer: Pointer) -> Lease:
    """Lease steps that need not be those of CURRENT; for the store's publisher. Raises as `lease_current`."""
    lease = _try_lease_chain(directory, pointer)
    if lease is None:
        what = f"{directory}: another publisher is at work on a step of version {pointer.version}"
        raise SyncError(f"{what}: one directory has one publisher at a time.")
    return lease


def _try_lease(directory: Path, pointer: Pointer) -> Lease | None:
    """Lease all steps; None while a publisher is at work on one, or has replaced it."""
    if not pointer.before:
        held = _try_hold(directory, pointer)
        return None if held is None else Lease(pointer, [held], [])
    try:
        return _try_lease_chain(directory, pointer)
    except SyncError as problem:
        why = f"{directory}: version {pointer.version} cannot be read: {problem}"
    try:
        held = _try_hold(directory, pointer.anchor)
    except SyncError as problem:
        raise type(problem)(f"{why} Nor can its anchor, version {pointer.anchor.version}: {problem}") from None
    return None if held is None else Lease(pointer.anchor, [held], [], why)


def _try_lease_chain(directory: Path, pointer: Pointer) -> Lease | None:
    held: list[HeldDirectory] = []
    for step in pointer.steps:
        one = _try_hold(directory, step)
        if one is None:
            return None
        held.append(one)
    steps = zip(held[1:], pointer.steps[1:], pointer.steps, strict=False)
    return Lease(pointer, held, [OpenLink(one.directory, step, base) for one, step, base in steps])


def _try_hold(directory: Path, step: Pointer) -> HeldDirectory | None:
    """Lock a version's directory; None while a publisher is at work on it."""
    try:
        with opened_directory(directory) as store, opened_directory(VERSIONS, dir_fd=store) as versions:
            version = open_directory(step.directory, dir_fd=versions)
        try:
            lock = open_file(LEASE, dir_fd=version)
        except OSError:
            os.close(version)
            raise
    except OSError as problem:
        raise unusable(directory, problem) from None
    held = HeldDirectory(version, lock)
    return held if try_lock(lock, shared=True) else None
