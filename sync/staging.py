"""The directory in which a publisher writes the next version, and the files that it writes durably."""

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sync.own_files import open_directory, open_file, opened_directory, opened_file
from sync.pointer import LEASE
from sync.shared_files import reserve, try_lock, write_at

_STAGING = ".staging"
READ_WRITE = os.O_RDWR | os.O_CREAT


@contextmanager
def staging_directory(versions: Path, keep: Collection[str], *, recycle: bool) -> Iterator[Path]:
    """Yield a directory to write the next version in, under an exclusive lease; it is removed on error.

    Versions without readers are removed, but for those of `keep`. Rewriting the files of an old version is several
    times faster than making new ones, so with `recycle` the first of them is reused.
    """
    staging = versions / _STAGING
    lock = None
    try:
        for name in sorted(os.listdir(versions)):  # .staging, left by a publisher that died, sorts first
            if name in keep:
                continue
            if not _is_own_directory(versions / name):
                remove(versions / name)
                continue
            free = _lock_unleased(versions / name)
            if free is None:
                continue
            if lock is None and recycle:
                lock = free
                os.rename(versions / name, staging)
            else:
                remove(versions / name)
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


def is_own_file(path: Path) -> bool:
    """Whether there is a regular file of this user."""
    try:
        os.close(open_file(path))
    except OSError:
        return False
    return True


def remove(path: Path) -> None:
    """Remove the file, link or tree at a path; the target of a link stays."""
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            os.unlink(path)


def allocate(path: Path, num_bytes: int) -> None:
    """Give a file, made if it is absent, exactly this size, with space for all of it on the disk."""
    with opened_file(path, READ_WRITE) as file:
        if os.fstat(file).st_size > num_bytes:
            os.ftruncate(file, num_bytes)
        reserve(file, num_bytes)


def write_file(path: Path, content: memoryview | bytes) -> None:
    """Write a file, made if it is absent, from its first byte on, to the disk."""
    with opened_file(path, READ_WRITE) as file:
        write_at(file, content, 0)
        os.fsync(file)


def sync_directory(path: Path) -> None:
    """Have the names in a directory on the disk."""
    with opened_directory(path) as directory:
        os.fsync(directory)


def _lock_unleased(version: Path) -> int | None:
    """An exclusive lock on the version's lease, or None while a reader holds it."""
    if not is_own_file(version / LEASE):
        remove(version / LEASE)
    lock = open_file(version / LEASE, READ_WRITE)
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
