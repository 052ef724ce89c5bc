"""Opens files and directories of this user, and refuses links and files of others. Nothing here waits.

A path may name a link, a named pipe (opening one waits for its other end), a device, a file of another user, or one
that others may write to. So each is looked at before it is opened, and again afterwards, when nothing can be put in its
place any more. Whatever is wrong is an `OSError` whose `strerror` is the end of a sentence about the path.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

AnyPath: TypeAlias = str | os.PathLike[str]
CACHE_VARIABLE = "ROLLOUT_ENGINE_CACHE"
"""Environment variable with the directory to use instead of the user's cache directory."""
OTHERS = 0o077
"""Mode bits by which others read, write or enter."""
OTHERS_WRITE = 0o022
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK
_KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def cache_directory(name: str) -> Path:
    """Directory in which generated files of one kind are kept between runs."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE_VARIABLE) or Path(home) / "rollout_engine") / name


def open_file(path: AnyPath, flags: int = os.O_RDONLY, *, dir_fd: int | None = None) -> int:
    """Open a regular file that is this user's, has this one name, and that no other user may write to.

    With `os.O_CREAT` it is made (mode 0600) if it is absent.
    """
    try:
        _check_file(os.stat(path, dir_fd=dir_fd, follow_symlinks=False), path)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
        flags |= os.O_EXCL
    file = os.open(path, flags | _FLAGS, 0o600, dir_fd=dir_fd)
    try:
        _check_file(os.fstat(file), path)
    except OSError:
        os.close(file)
        raise
    return file


def is_own_file(path: AnyPath, *, dir_fd: int | None = None) -> bool:
    """Whether there is a file that `open_file` opens, and no link, directory or file of another user."""
    try:
        _check_file(os.stat(path, dir_fd=dir_fd, follow_symlinks=False), path)
    except OSError:
        return False
    return True


def open_directory(path: AnyPath, *, dir_fd: int | None = None, closed_to: int = OTHERS_WRITE) -> int:
    """Open a directory that is this user's, in which others have none of the rights `closed_to`."""
    _check_directory(os.stat(path, dir_fd=dir_fd, follow_symlinks=False), path, closed_to)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS, dir_fd=dir_fd)
    try:
        _check_directory(os.fstat(directory), path, closed_to)
    except OSError:
        os.close(directory)
        raise
    return directory


def require_regular(path: AnyPath) -> None:
    """Raise `OSError` unless there is a regular file of any user."""
    _check_kind(os.stat(path), path, stat.S_IFREG)


def open_regular(path: AnyPath) -> int:
    """Open a regular file of any user for reading. Links are followed, as caches of checkpoints are made of them."""
    require_regular(path)
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _check_kind(os.fstat(file), path, stat.S_IFREG)
    except OSError:
        os.close(file)
        raise
    return file


def read_regular(path: AnyPath, max_bytes: int) -> bytes:
    """All bytes of a regular file of any user; more than `max_bytes` are an `OSError`."""
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise _make_refusal(path, f"it has more than {max_bytes} bytes")
    return content


@contextmanager
def opened_file(path: AnyPath, flags: int = os.O_RDONLY, *, dir_fd: int | None = None) -> Iterator[int]:
    """`open_file`; closes it at the end."""
    file = open_file(path, flags, dir_fd=dir_fd)
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def opened_directory(path: AnyPath, *, dir_fd: int | None = None) -> Iterator[int]:
    """`open_directory`; closes it at the end."""
    directory = open_directory(path, dir_fd=dir_fd)
    try:
        yield directory
    finally:
        os.close(directory)


def make_directories(path: Path, *, closed_to: int = OTHERS_WRITE) -> None:
    """Create `path` and each ancestor that it lacks (mode 0700), and check those made, and `path`."""
    missing = [path]
    while not os.path.lexists(missing[-1].parent):
        missing.append(missing[-1].parent)
    for directory in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        os.close(open_directory(directory, closed_to=closed_to))  # another process may have been first


def read_small(path: AnyPath, max_bytes: int, *, dir_fd: int | None = None) -> bytes:
    """All bytes of such a file; more than `max_bytes` are an `OSError`."""
    with opened_file(path, dir_fd=dir_fd) as file:
        size = os.fstat(file).st_size
        if size > max_bytes:
            raise _make_refusal(path, f"it has {size} bytes; at most {max_bytes} are read")
        with os.fdopen(file, "rb", closefd=False) as stream:
            return stream.read(max_bytes)


def _check_file(status: os.stat_result, path: AnyPath) -> None:
    _check_kind(status, path, stat.S_IFREG)
    _check_owner(status, path, OTHERS_WRITE)
    if status.st_nlink > 1:
        raise _make_refusal(path, f"it has {status.st_nlink} names (hard links), by any of which it could change")


def _check_directory(status: os.stat_result, path: AnyPath, closed_to: int) -> None:
    _check_kind(status, path, stat.S_IFDIR)
    _check_owner(status, path, closed_to)


def _check_kind(status: os.stat_result, path: AnyPath, kind: int) -> None:
    found = stat.S_IFMT(status.st_mode)
    if found != kind:
        raise _make_refusal(path, f"it is {_KINDS.get(found, 'of an unknown kind')}, not {_KINDS[kind]}")


def _check_owner(status: os.stat_result, path: AnyPath, closed_to: int) -> None:
    if status.st_uid != os.geteuid():
        raise _make_refusal(path, f"it belongs to user {status.st_uid}, this process to user {os.geteuid()}")
    if status.st_mode & closed_to:
        rights = "may write to it" if closed_to == OTHERS_WRITE else "have rights to it"
        advice = "chmod go-w" if closed_to == OTHERS_WRITE else "chmod 0700"
        raise _make_refusal(path, f"others {rights} (mode {stat.S_IMODE(status.st_mode):04o}; {advice} mends that)")


def _make_refusal(path: AnyPath, why: str) -> OSError:
    return OSError(errno.EPERM, why, os.fspath(path))
