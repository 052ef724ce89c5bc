"""A directory of blocks that several processes of one user share, one file for each block, bounded in bytes.

A file is written under a name of its own, locked by its writer, and renamed when it is whole. A reader finds it whole
or not at all, whatever is killed; each frame is checked when it is read. Nothing is ever written into a file that has
its final name. Links are not followed, and files of other users are not opened; a block replaces them. A directory that
was removed is made again by the next write.

    write    account += bytes, new file ── pwrite ── rename            over the bound: make room first
    remove   unlink, account -= bytes                                  each step inside `SharedAccount.hold`
"""

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path

from rollout_engine.kv.block_frame import HEADER_BYTES, check_data, make_header, read_header
from rollout_engine.kv.block_listing import UNFINISHED, OldestFiles, StoredFile, list_blocks
from rollout_engine.kv.bounds import default_bytes, free_memory
from rollout_engine.kv.mapped_file import copy_file, map_file
from rollout_engine.kv.shared_account import Account, SharedAccount, lock_within, open_or_create
from sync.own_files import OTHERS, is_own_file, open_directory, opened_file
from sync.shared_files import make_private, try_lock, write_at

FREED_SHARE = 16
"""An eviction leaves room for this part of the bound, so that not every write has to list all files."""
_ATTEMPTS = 3
_EVICTION_SECONDS = 5.0
_USERS_SECONDS = 10.0
_BATCH = 16
"""Files that are removed under one lock of the account."""


class NoRoom(OSError):
    """A block that does not fit into the bound of the directory."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.ENOSPC, what)


class BlockDirectory:
    """The blocks of one namespace in a directory, whose bound is one for all namespaces.

    One thread at a time writes and removes; any thread may read at the same time, and other processes do all of it.
    """

    def __init__(self, path: Path, namespace: str, max_bytes: int | None, *, is_mapped: bool) -> None:
        """Make the directory if it is absent. `is_mapped`: it lies in memory, and `read` maps its files.

        Raises `OSError`: `path` is not this user's alone, or another process keeps a lock there.
        """
        self._path, self._is_mapped = path, is_mapped
        self._namespace, self._namespace_bytes = namespace, bytes.fromhex(namespace)
        self._folders: set[str] = set()
        """Folders of the namespace that were found to be this user's."""
        self.num_evicted = 0
        """Files that this process has removed to make room."""
        self._opened = ExitStack()
        """Descriptors: also those of directories that were removed, which other threads may still read by."""
        try:
            self._open()
            self.max_bytes = max_bytes if max_bytes is not None else default_bytes(self._free_bytes())
        except BaseException:
            self._opened.close()
            raise

    def account(self) -> Account:
        """Bytes and files of all namespaces just now."""
        return self._account.read()

    def has(self, key: bytes) -> bool:
        """Whether a file of this user stands in the block's place, and no link."""
        return is_own_file(_path(key), dir_fd=self._own)

    def read(self, key: bytes, used_ns: int) -> memoryview:
        """The bytes of a block, whose time of last use becomes `used_ns`.

        Raises `FileNotFoundError`, `DamagedBlock`, or another `OSError` for a file that is not this user's.
        """
        path = _path(key)
        self._require_folder(path[:2])
        with opened_file(path, dir_fd=self._own) as file:
            num_bytes = os.fstat(file).st_size - HEADER_BYTES
            digest = read_header(os.pread(file, HEADER_BYTES, 0), self._namespace_bytes, key, num_bytes)
            if self._is_mapped:
                data = map_file(file, HEADER_BYTES + num_bytes)[HEADER_BYTES:]
            else:
                data = copy_file(file, num_bytes, HEADER_BYTES)
            check_data(data, digest)
            os.utime(file, ns=(used_ns, used_ns))
        return data

    def write(self, key: bytes, data: memoryview | bytes) -> bool:
        """Store a block; False if it is stored already. Raises `NoRoom` or another `OSError`, with nothing changed."""
        path, num_bytes = _path(key), HEADER_BYTES + len(data)
        if self._account.is_removed() or os.fstat(self._own).st_nlink == 0:
            self._open()
        if self.has(key):
            return False
        self._make_folder(path[:2])
        header = make_header(self._namespace_bytes, key, data)
        unfinished = f"{path[:3]}{UNFINISHED}{path[3:]}.{secrets.token_hex(8)}"
        try:
            file, num_counts = self._begin(unfinished, num_bytes)
        except FileNotFoundError:  # the folder was removed: the next write makes it
            self._folders.discard(path[:2])
            raise
        try:
            write_at(file, header, 0)
            write_at(file, data, HEADER_BYTES)
            with self._account.hold() as account:
                if self.has(key):  # another process was first
                    self._remove(account, unfinished, self._own)
                    return False
                account.rename(num_bytes, num_counts)
                os.rename(unfinished, path, src_dir_fd=self._own, dst_dir_fd=self._own)
        except BaseException:
            with self._account.hold() as account:
                self._remove(account, unfinished, self._own)
            raise
        finally:
            os.close(file)
        return True

    def remove(self, key: bytes) -> None:
        """Remove a block, if it is there. Raises `OSError`."""
        with self._account.hold() as account:
            self._remove(account, _path(key), self._own)

    def clear(self) -> None:
        """Remove all blocks of the namespace. Raises `OSError`."""
        self._remove_all(file for file in list_blocks(self._root, [self._namespace]) if not file.is_unfinished)

    def close(self, *, is_temporary: bool = False) -> None:
        """Close the directory. `is_temporary`: its last user removes all blocks."""
        if is_temporary and try_lock(self._users):
            with suppress(OSError):
                self._remove_all(list_blocks(self._root))
        self._opened.close()

    def _open(self) -> None:
        """Open the directory, made if it is absent, and count its files if they were not counted. Raises `OSError`."""
        make_private(self._path)
        with ExitStack() as opened:
            root = _close_later(opened, open_directory(self._path, closed_to=OTHERS))
            users = _close_later(opened, open_or_create("users", root))
            lock_within(users, _USERS_SECONDS, shared=True)
            evicting = _close_later(opened, open_or_create("evicting", root))
            account = SharedAccount(root)
            opened.callback(account.close)
            with suppress(FileExistsError):
                os.mkdir(self._namespace, 0o700, dir_fd=root)
            own = _close_later(opened, open_directory(self._namespace, dir_fd=root, closed_to=OTHERS))
            self._opened.callback(opened.pop_all().close)
        self._root, self._users, self._evicting, self._account, self._own = root, users, evicting, account, own
        self._folders.clear()
        if not account.read().is_known:
            self._count_again()

    def _free_bytes(self) -> int:
        """Bytes that this user can have for blocks, those that blocks take already included."""
        status = os.fstatvfs(self._root)
        free = status.f_bavail * status.f_frsize
        return (min(free, free_memory()) if self._is_mapped else free) + self._account.read().num_bytes

    def _begin(self, name: str, num_bytes: int) -> tuple[int, int]:
        """Make an unfinished file, locked and counted. Returns it and the number of counts of all files until then.

        Raises `NoRoom` if there is none, also not after an eviction.
        """
        for _ in range(_ATTEMPTS if num_bytes <= self.max_bytes else 0):
            with self._account.hold() as account:
                if account.is_known and account.num_bytes + num_bytes <= self.max_bytes:
                    account.add(num_bytes)
                    self._account.write(account)
                    try:
                        return _make_locked(name, self._own, num_bytes), account.num_counts
                    except OSError:
                        account.remove(num_bytes)
                        raise
            self._make_room(num_bytes)
        raise NoRoom(f"{num_bytes} bytes have no room within the bound of {self.max_bytes} bytes")

    def _make_room(self, num_bytes: int) -> None:
        """Remove the blocks that were not used for the longest time, unless another process has done so meanwhile."""
        lock_within(self._evicting, _EVICTION_SECONDS)
        try:
            account = self._account.read()
            if account.is_known and account.num_bytes + num_bytes <= self.max_bytes:
                return
            goal = self.max_bytes - max(num_bytes, self.max_bytes // FREED_SHARE)
            oldest = OldestFiles(account.num_bytes - goal if account.is_known else float("inf"))
            self._count(oldest)
            for files in _batches(oldest.in_order()):
                with self._account.hold() as account:
                    for file in files:
                        if account.num_bytes <= goal:
                            return
                        self.num_evicted += self._remove(account, file.path, self._root)
        finally:
            fcntl.flock(self._evicting, fcntl.LOCK_UN)

    def _count_again(self) -> None:
        lock_within(self._evicting, _EVICTION_SECONDS)
        try:
            self._count(OldestFiles(0))
        finally:
            fcntl.flock(self._evicting, fcntl.LOCK_UN)

    def _count(self, oldest: OldestFiles) -> None:
        """Count all files, remove those that killed writers left unfinished, and show the others to `oldest`."""
        with self._account.hold() as account:
            account.begin_count()
        num_bytes = num_files = 0
        for file in list_blocks(self._root):
            if file.is_unfinished and self._remove_abandoned(file):
                continue
            num_bytes, num_files = num_bytes + file.num_bytes, num_files + 1
            if not file.is_unfinished:
                oldest.add(file)
        with self._account.hold() as account:
            account.end_count(num_bytes, num_files)

    def _remove_abandoned(self, file: StoredFile) -> bool:
        """Remove a file whose writer has ended; False if it is still written, or finished by now."""
        with suppress(OSError), self._account.hold() as account, opened_file(file.path, dir_fd=self._root) as opened:
            return try_lock(opened) and self._remove(account, file.path, self._root)
        return False

    def _remove_all(self, files: Iterable[StoredFile]) -> None:
        for batch in _batches(files):
            with self._account.hold() as account:
                for file in batch:
                    if not file.is_unfinished:
                        self._remove(account, file.path, self._root)

    def _remove(self, account: Account, path: str, directory: int) -> bool:
        """Remove a file, and count it; False if there is none. Links are removed and have never been counted."""
        try:
            status = os.stat(path, dir_fd=directory, follow_symlinks=False)
            os.unlink(path, dir_fd=directory)
        except FileNotFoundError:
            return False
        if is_file := stat.S_ISREG(status.st_mode):
            account.remove(status.st_size)
        return is_file

    def _require_folder(self, folder: str) -> None:
        """Raise `OSError` unless a folder of the namespace is this user's, and no link."""
        if folder not in self._folders:
            os.close(open_directory(folder, dir_fd=self._own))
            self._folders.add(folder)

    def _make_folder(self, folder: str) -> None:
        if folder not in self._folders:
            with suppress(FileExistsError):
                os.mkdir(folder, 0o700, dir_fd=self._own)
            self._require_folder(folder)


def _path(key: bytes) -> str:
    name = key.hex()
    return f"{name[:2]}/{name[2:]}"


def _close_later(opened: ExitStack, file: int) -> int:
    opened.callback(os.close, file)
    return file


def _make_locked(name: str, directory: int, num_bytes: int) -> int:
    """Make a locked file that has its final size from now on. Raises `OSError`, and leaves none then."""
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=directory)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, num_bytes)
    except OSError:
        os.close(file)
        os.unlink(name, dir_fd=directory)
        raise
    return file


def _batches(files: Iterable[StoredFile]) -> Iterator[list[StoredFile]]:
    remaining = iter(files)
    while batch := list(islice(remaining, _BATCH)):
        yield batch
