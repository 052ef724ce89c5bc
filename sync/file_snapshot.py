"""A snapshot of files that other programs may rewrite: all are read as they were at one moment.

    open all ──> none has changed for 20 ms ──> the paths still name them ──> read ... ──> check

A write changes a file's times before it changes bytes, a cut changes its size, and a rename over it gives the path
another inode. So bytes that are read without an error were there, in all files, when the last one was opened. The
20 ms are for file systems whose clock is coarse: within one tick, a second write would leave the same times.

Nothing is mapped: the mapping of a file that is cut ends the process with a bus error at the next access.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from sync.errors import ChecksumMismatch, ManifestMismatch
from sync.own_files import open_regular
from sync.shared_files import read_at

_SETTLED_NS = 20_000_000
_MAX_JSON_BYTES = 2**27
_PATIENCE_NS = 2_000_000_000
"""How long to wait for files that keep changing."""


class _Stamp(NamedTuple):
    """Properties of a file that change when it is written, cut or replaced."""

    inode: tuple[int, int]
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, status: os.stat_result) -> "_Stamp":
        return cls((status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class SnapshotFile:
    """A file held open, and the stamp it had when it was opened. Several threads may read."""

    def __init__(self, path: Path) -> None:
        """Raises `ManifestMismatch` if it cannot be opened."""
        self._file = -1
        self.path = path
        try:
            self._file = open_regular(path)
        except OSError as problem:
            raise ManifestMismatch(f"{path} cannot be opened: {problem.strerror}.") from None
        self.stamp = _Stamp.of(os.fstat(self._file))

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def fetch(self, out: memoryview, start: int) -> None:
        """Fill `out` with the bytes from `start` on. Raises as `check` does."""
        is_whole = read_at(self._file, out, start)
        self._check(os.fstat(self._file))
        if not is_whole:
            raise ChecksumMismatch(f"{self.path} has fewer than {start + len(out)} bytes.")

    def content(self) -> bytes:
        """All bytes of a file of JSON. Raises as `check` does, and `ManifestMismatch` if it is too large to be one."""
        if self.stamp.size > _MAX_JSON_BYTES:
            what = f"has {self.stamp.size} bytes; at most {_MAX_JSON_BYTES} are read"
            raise ManifestMismatch(f"{self.path} {what}. Save or download it again.")
        out = bytearray(self.stamp.size)
        self.fetch(memoryview(out), 0)
        return bytes(out)

    def check(self) -> None:
        """Raise `ChecksumMismatch` unless the path still names this file, and the file is as it was."""
        try:
            named = os.stat(self.path)
        except OSError as problem:
            raise self._make_changed_error(f"was removed ({problem.strerror})") from None
        self._check(named)
        self._check(os.fstat(self._file))

    def _check(self, status: os.stat_result) -> None:
        now = _Stamp.of(status)
        if now == self.stamp:
            return
        if now.inode != self.stamp.inode:
            what = "was replaced by another file"
        elif now.size != self.stamp.size:
            what = f"changed its size from {self.stamp.size} to {now.size} bytes"
        else:
            what = "was written to, moved or removed (its change time moved)"
        raise self._make_changed_error(what)

    def _make_changed_error(self, what: str) -> ChecksumMismatch:
        return ChecksumMismatch(f"{self.path} {what} while it was read. {_ADVICE}")


_ADVICE = "Nothing of it was used. Update once the save is complete, or publish weights: sync.publish is atomic."


class FileSet:
    """Files that are held open together, the last opened last."""

    files: list[SnapshotFile]

    def check(self) -> None:
        """Raise `ChecksumMismatch` unless all files are as they were and their paths still name them."""
        for file in self.files:
            file.check()


_Set = TypeVar("_Set", bound=FileSet)


def open_snapshot(open_all: Callable[[], _Set]) -> _Set:
    """Call `open_all()` again and again until none of its files has just changed, and return that set.

    Raises `ChecksumMismatch` when files keep changing for two seconds.
    """
    last: list[_Stamp] = []
    deadline = time.monotonic_ns() + _PATIENCE_NS
    while True:
        held = open_all()
        stamps = [file.stamp for file in held.files]
        try:
            if time.time_ns() - max(stamp.changed for stamp in stamps) > _SETTLED_NS or stamps == last:
                held.check()
                return held
        except ChecksumMismatch:
            pass  # replaced meanwhile
        if time.monotonic_ns() > deadline:
            youngest = max(held.files, key=lambda file: file.stamp.changed)
            what = f"{youngest.path} is being rewritten: it, or a file beside it, kept changing for two seconds"
            raise ChecksumMismatch(f"{what}. {_ADVICE}")
        last = stamps
        time.sleep(_SETTLED_NS / 1e9)
