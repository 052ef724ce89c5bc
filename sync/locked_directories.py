"""Directories of engines: random names, mode 0700, and a locked file in each that lives, so that others can be removed.

The parent locks the file before it starts the core's process, which inherits the lock and keeps it until it ends. So
neither needs the other to live for the directory to be known as theirs, or as nobody's.
"""

import os
import shutil
import stat
import time
from pathlib import Path

from sync.own_files import open_file
from sync.shared_files import check_private, lock, try_lock

SHARED_MEMORY = "/dev/shm"
"""File system in memory, through which weights are sent if they fit."""
PREFIX = "rollout-engine-"
"""Prefix of the names of all such directories."""
_STALE_SECONDS = 60.0
"""A directory younger than this is kept: its lock may not be taken yet."""


def lock_directory(directory: str | Path) -> int:
    """Mark a directory as in use until all copies of the descriptor that is returned are closed.

    Raises `OSError` unless it is this user's alone.
    """
    check_private(Path(directory))
    descriptor = open_file(Path(directory) / "lock", os.O_RDWR | os.O_CREAT)
    lock(descriptor)
    return descriptor


def sweep_stale_directories(parent: str) -> None:
    """Remove the directories in `parent` of this user's engines that were killed, and could not do so themselves."""
    for path in Path(parent).glob(f"{PREFIX}*"):
        try:
            status = path.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_ours and time.time() - status.st_mtime > _STALE_SECONDS and _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # another process is removing it


def _is_abandoned(directory: Path) -> bool:
    try:
        descriptor = open_file(directory / "lock", os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        return try_lock(descriptor)
    finally:
        os.close(descriptor)
