"""Files that several processes of one user share: private directories, locks, reserved space, whole reads and writes.

Locks are those of `flock`, which Linux and macOS have: they last until the file is closed or the process ends.
"""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from sync.errors import SyncError, TransferTimeout
from sync.own_files import OTHERS, make_directories, open_directory, open_file

_PIECE = bytes(1 << 20)
_LOCK_SECONDS = 10.0
_POLL_SECONDS = 0.005


def make_private(directory: Path) -> None:
    """Create `directory` (mode 0700), and ancestors, if absent; raises as `check_private` does."""
    make_directories(directory, closed_to=OTHERS)


def check_private(directory: Path) -> None:
    """Raise `OSError` unless `directory` is one, no link, this user's, and closed to others."""
    os.close(open_directory(directory, closed_to=OTHERS))


def lock(file: int) -> None:
    """Take the exclusive lock of an open file. Waits for others; `TransferTimeout` after ten seconds."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while not try_lock(file):
        if time.monotonic() > deadline:
            raise TransferTimeout(f"Another process holds a lock that is this one's for {_LOCK_SECONDS:g} s: end it.")
        time.sleep(_POLL_SECONDS)


def try_lock(file: int, *, shared: bool = False) -> bool:
    """Take the lock of an open file, exclusive or shared; False if another holder is in the way."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_sole(path: Path) -> int:
    """Open the file at `path`, created if need be, and lock it until it is closed; `SyncError` if it is locked."""
    while True:
        try:
            file = open_file(path, os.O_RDWR | os.O_CREAT)
        except FileExistsError:
            continue  # another process made it just now
        if not try_lock(file):
            os.close(file)
            raise SyncError(
                f"Another trainer sends weights through {path.parent}: one directory has one trainer at a time."
            )
        with suppress(FileNotFoundError):  # its last owner removed it between our open and our lock
            if os.stat(path, follow_symlinks=False).st_ino == os.fstat(file).st_ino:
                return file
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

    If there is no room this raises `OSError` now; otherwise writing to a mapped page would be a bus error.
    """
    if hasattr(os, "posix_fallocate"):
        if num_bytes:
            os.posix_fallocate(file, 0, num_bytes)
        return
    for start in range(os.fstat(file).st_size, num_bytes, len(_PIECE)):
        write_at(file, _PIECE[: num_bytes - start], start)
