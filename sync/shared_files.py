"""Files that several processes share: locked until they are closed, or their process ends, with room for their bytes.

Locks are those of `flock`, which Linux and macOS have.
"""

import os

_PIECE = bytes(1 << 20)


def lock(file: int) -> None:
    """Take the exclusive lock of an open file; waits for others."""
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX)


def try_lock(file: int, *, shared: bool = False) -> bool:
    """Take the lock of an open file, exclusive or beside other shared ones; False where others are in the way."""
    import fcntl

    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def reserve(file: int, num_bytes: int) -> None:
    """Grow an open file to `num_bytes` if it is smaller, all of them on the disk: `OSError` now where there is no room,
    not a bus error when a page is written. What it holds stays."""
    if hasattr(os, "posix_fallocate"):
        if num_bytes:
            os.posix_fallocate(file, 0, num_bytes)
        return
    for start in range(os.fstat(file).st_size, num_bytes, len(_PIECE)):
        _write(file, start, min(num_bytes - start, len(_PIECE)))


def _write(file: int, start: int, count: int) -> None:
    """`count` zeros from `start` on."""
    while count:
        written = os.pwrite(file, _PIECE[:count], start)
        start, count = start + written, count - written
