"""The bytes and files of a directory that several processes fill: a small file, changed under a lock.

    byte   0       8       16            24            32       40      48
           | bytes | files | added bytes | added files | counts | check |

A change is counted before it adds bytes and after it has removed some. So a process that is killed at any point leaves
a number that is too large, never one that is too small, and the next count of all files corrects it. "Added" is the sum
of all additions since such a count began, which may have missed them, as files that are renamed; "counts" is the
number of those begun.
"""

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import xxhash

from sync.own_files import open_file
from sync.shared_files import try_lock, write_at

_FIELDS = struct.Struct("<QQQQQ")
_CHECK = struct.Struct("<Q")
_LOCK_SECONDS = 5.0
_POLL_SECONDS = 0.0005


@dataclass(slots=True)
class Account:
    """The numbers, to be changed inside `SharedAccount.hold`."""

    num_bytes: int = 0
    num_files: int = 0
    added_bytes: int = 0
    added_files: int = 0
    num_counts: int = 0
    is_known: bool = False
    """Whether the numbers were counted, and could be read."""

    def add(self, num_bytes: int) -> None:
        """Count a file that is about to be made."""
        self.num_bytes += num_bytes
        self.num_files += 1
        self._note_added(num_bytes)

    def rename(self, num_bytes: int, num_counts: int) -> None:
        """Count a file that is about to get its final name, and was made when there had been `num_counts`."""
        if self.num_counts != num_counts:
            self._note_added(num_bytes)

    def remove(self, num_bytes: int) -> None:
        """Count a file that was removed."""
        self.num_bytes = max(self.num_bytes - num_bytes, 0)
        self.num_files = max(self.num_files - 1, 0)

    def begin_count(self) -> None:
        """Note that all files are about to be counted."""
        self.added_bytes = self.added_files = 0
        self.num_counts += 1

    def end_count(self, num_bytes: int, num_files: int) -> None:
        """Take the result of the count, and the additions meanwhile."""
        self.num_bytes, self.num_files = num_bytes + self.added_bytes, num_files + self.added_files
        self.is_known = True

    def _note_added(self, num_bytes: int) -> None:
        self.added_bytes += num_bytes
        self.added_files += 1


class SharedAccount:
    """The account of an open directory, for all processes that fill it. Any thread may use it."""

    def __init__(self, directory: int) -> None:
        """`directory`: its descriptor. Raises `OSError`."""
        self._file = open_or_create("account", directory)
        self._lock = threading.Lock()

    @contextmanager
    def hold(self) -> Iterator[Account]:
        """Lock the account and write it back at the end. Raises `TimeoutError` if another process keeps its lock."""
        with self._lock:
            lock_within(self._file, _LOCK_SECONDS)
            try:
                account = self.read()
                try:
                    yield account
                finally:
                    self.write(account)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def read(self) -> Account:
        """The numbers just now, without the lock; an account that is not known if they cannot be read."""
        content = os.pread(self._file, _FIELDS.size + _CHECK.size, 0)
        if len(content) < _FIELDS.size + _CHECK.size:
            return Account()
        fields = content[: _FIELDS.size]
        if _CHECK.unpack_from(content, _FIELDS.size) != (xxhash.xxh3_64_intdigest(fields),):
            return Account()
        account = Account(*_FIELDS.unpack(fields))
        account.is_known = True
        return account

    def write(self, account: Account) -> None:
        """Write the numbers inside `hold`: a process that is killed from here on has counted them."""
        if account.is_known:
            added = account.added_bytes, account.added_files
            fields = _FIELDS.pack(account.num_bytes, account.num_files, *added, account.num_counts)
            write_at(self._file, fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields)), 0)

    def is_removed(self) -> bool:
        """Whether the file was removed: it has no name any more."""
        return os.fstat(self._file).st_nlink == 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def open_or_create(name: str, directory: int) -> int:
    """Open this user's file for reading and writing, made if it is absent. Raises `OSError`."""
    while True:
        try:
            return open_file(name, os.O_RDWR | os.O_CREAT, dir_fd=directory)
        except FileExistsError:
            continue  # another process made it just now


def lock_within(file: int, seconds: float, *, shared: bool = False) -> None:
    """Take the lock of an open file. Raises `TimeoutError` if another process holds it for that long."""
    deadline = time.monotonic() + seconds
    while not try_lock(file, shared=shared):
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"another process has held its lock for {seconds:g} s: end it")
        time.sleep(_POLL_SECONDS)
