"""Files that several processes of one user share: private directories, locks, reserved space, whole reads and writes.

Locks are those of `flock`, which Linux and macOS have: they last until the file is closed or the process ends.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sync.errors import SyncError

_PIECE = bytes(1 << 20)


def make_private(directory: Path) -> None:
    """Create `directory` (mode 0700) if absent; raises as `check_private` does, and `OSError`."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(directory)


def check_private(directory: Path) -> None:
    """Raise `SyncError` unless `directory` is this user's and closed to others; `OSError` if it does not exist."""
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise SyncError(f"{directory}, where trainer and engine meet, must be this user's alone (mode 0700).")


def lock(file: int) -> None:
    """Take the exclusive lock of an open file; waits for others."""
    fcntl.flock(file, fcntl.LOCK_EX)


def try_lock(file: int, *, shared: bool = False) -> bool:
    """Take the lock of an open file, exclusive or shared; False where another holder is in the way."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_sole(path: Path) -> int:
    """Open the file at `path`, created if need be, and lock it until it is closed; `SyncError` if it is locked."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if not try_lock(file):
            os.close(file)
            raise SyncError(
                f"Another trainer sends weights through {path.parent}: one directory has one trainer at a time."
            )
        try:
            if os.stat(path).st_ino == os.fstat(file).st_ino:
                return file
        except FileNotFoundError:
            pass  # its last owner removed it between our open and our lock
        os.close(file)


@contextmanager
def opened(path: str | os.PathLike[str], flags: int) -> Iterator[int]:
    """Open a file for this user alone; yields its descriptor and closes it."""
    file = os.open(path, flags, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def read_at(file: int, out: memoryview, start: int) -> bool:
    """Fill `out` with the bytes of an open file from `start` on; False if the file ends before."""
    while out:
        count = os.preadv(file, [out], start)
        if count == 0:
            return False
        out, start = out[count:], start + count
    return True


def write_at(file: int, content: memoryview | bytes, start: int) -> None:
    """Write all of `content` to an open file from byte `start` on."""
    content = memoryview(content)
    while content:
        count = os.pwrite(file, content, start)
        content, start = content[count:], start + count


def reserve(file: int, num_bytes: int) -> None:
    """Grow an open file to `num_bytes` if it is smaller, with space for all of them on the disk, and keep its content.

    Where there is no room this raises `OSError` now; otherwise writing to a mapped page would be a bus error.
    """
    if hasattr(os, "posix_fallocate"):
        if num_bytes:
            os.posix_fallocate(file, 0, num_bytes)
        return
    for start in range(os.fstat(file).st_size, num_bytes, len(_PIECE)):
        write_at(file, _PIECE[: num_bytes - start], start)
