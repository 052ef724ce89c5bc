"""A directory for published weights, in shared memory where there is some."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rollout_engine.process.core_directory import PREFIX, SHARED_MEMORY, lock_directory

_REMOVER = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
"""A program that waits for the end of its parent and removes a directory then."""


class StoreDirectory:
    """A directory of a random name, mode 0700, until `remove`.

    If its process is killed, the next engine on this machine removes it; with `outlived=True` a small process does, at
    once.
    """

    def __init__(self, *, outlived: bool = False) -> None:
        place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}fleet-", dir=place))
        self._lock = lock_directory(self.path)
        self._remover = _start_remover(self.path) if outlived else None

    def remove(self) -> None:
        """Remove it with all that is in it. Call it once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        if self._remover is not None:
            self._remover.communicate()


def _start_remover(path: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _REMOVER, str(path)],
        stdin=subprocess.PIPE,
        start_new_session=True,  # signals for the parent's group are not for this one
    )
