"""Files that other programs may rewrite, read as they were at one moment.

    open all ──> none has changed for 20 ms ──> the paths still name them ──> read ... ──> check

A write changes a file's times before it changes bytes, a cut changes its size, and a rename over it gives the path
another inode. So whatever is read without an error lay there, in all files, at the moment of the last opening. The
20 ms are for file systems whose clock is coarse: within one tick, a second write would leave the same times.

Nothing is mapped: the mapping of a file that is cut ends the process with a bus error at the next access.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from sync.errors import ChecksumMismatch, ManifestMismatch

_SETTLED_NS = 20_000_000
_PATIENCE_NS = 2_000_000_000
"""How long files that keep changing are waited for."""


class _Stamp(NamedTuple):
    """Properties of a file that change when it is written, cut or replaced."""

    inode: tuple[int, int]
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, status: os.stat_result) -> "_Stamp":
        return cls((status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class HeldFile:
    """A file held open, and how it was when it was opened. Several threads may read."""

    def __init__(self, path: Path) -> None:
        """Raises `ManifestMismatch` if it cannot be opened."""
        self._file = -1
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as problem:
            raise ManifestMismatch(f"{path} cannot be opened: {problem.strerror}.") from None
        self.stamp = _Stamp.of(os.fstat(self._file))

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def fetch(self, out: memoryview, start: int) -> None:
        """Fill `out` with the bytes from `start` on. Raises as `check`."""
        while out:
            count = os.preadv(self._file, [out], start)
            if count == 0:
                self._check(os.fstat(self._file))
                raise ChecksumMismatch(f"{self.path} ends before byte {start + len(out)}, which it should have.")
            out, start = out[count:], start + count
        self._check(os.fstat(self._file))

    def content(self) -> bytes:
        """All of it. Raises as `check`."""
        out = bytearray(self.stamp.size)
        self.fetch(memoryview(out), 0)
        return bytes(out)

    def check(self) -> None:
        """Raise `ChecksumMismatch` unless the path still names this file, and the file is as it was."""
        try:
            named = os.stat(self.path)
        except OSError as problem:
            raise self._changed(f"was removed ({problem.strerror})") from None
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
        raise self._changed(what)

    def _changed(self, what: str) -> ChecksumMismatch:
        return ChecksumMismatch(f"{self.path} {what} while it was read. {_ADVICE}")


_ADVICE = "Nothing was taken from it. Update once the save is complete, or publish weights: sync.publish is atomic."


class HeldFiles(Protocol):
    """Something that holds files open."""

    @property
    def files(self) -> Sequence[HeldFile]:
        """All of them, the last opened last."""


_Held = TypeVar("_Held", bound=HeldFiles)


def open_settled(open_all: Callable[[], _Held]) -> _Held:
    """Call `open_all()` again and again, until no file has just changed.

    Raises `ChecksumMismatch` when files keep changing for two seconds.
    """
    last: list[_Stamp] = []
    deadline = time.monotonic_ns() + _PATIENCE_NS
    while True:
        held = open_all()
        stamps = [file.stamp for file in held.files]
        try:
            if time.time_ns() - max(stamp.changed for stamp in stamps) > _SETTLED_NS or stamps == last:
                for file in held.files:
                    file.check()
                return held
        except ChecksumMismatch:
            pass  # replaced meanwhile
        if time.monotonic_ns() > deadline:
            youngest = max(held.files, key=lambda file: file.stamp.changed)
            what = f"{youngest.path} is being rewritten: it, or a file beside it, has changed for two seconds on end"
            raise ChecksumMismatch(f"{what}. {_ADVICE}")
        last = stamps
        time.sleep(_SETTLED_NS / 1e9)
