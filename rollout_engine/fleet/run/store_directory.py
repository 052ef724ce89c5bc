"""A directory for published weights, in shared memory where there is some."""

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from rollout_engine.base.parent_death import module_command, start_process
from rollout_engine.execution.child_process import environment_with_package
from sync.locked_directories import PREFIX, SHARED_MEMORY, lock_directory

_REMOVER = "rollout_engine.fleet.run.store_remover"
"""The module of a process that waits for the end of this one and removes a directory then."""


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
    return start_process(
        module_command(_REMOVER, [str(path)], signal.SIGCONT),
        stdin=subprocess.PIPE,
        env=environment_with_package(),
        start_new_session=True,  # signals for the parent's group are not for this one
    )
