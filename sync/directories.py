"""Directories through which two processes of one user meet."""

import os
from pathlib import Path

from sync.errors import SyncError
from sync.shared_files import try_lock


def make_private(directory: Path) -> None:
    """Create `directory` (mode 0700) if absent; raises as `check_private`, and `OSError`."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(directory)


def check_private(directory: Path) -> None:
    """`SyncError` unless `directory` is this user's and closed to everybody else; `OSError` if it is not there."""
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise SyncError("The directory where trainer and engine meet must be this user's alone (mode 0700).")


def open_sole(path: Path) -> int:
    """The file at `path`, created if need be and locked as long as it stays open; `SyncError` while another has it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if not try_lock(file):
            os.close(file)
            raise SyncError(f"Another trainer sends weights through {path.parent}: give each a directory.")
        try:
            if os.stat(path).st_ino == os.fstat(file).st_ino:
                return file
        except FileNotFoundError:
            pass  # its last owner removed it between our open and our lock
        os.close(file)
