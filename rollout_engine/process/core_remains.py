"""Removes what a core leaves whose owner was killed: the process itself if it hangs, and its directories."""

import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

from rollout_engine.process.weight_rendezvous import remove_directories
from sync.own_files import open_file
from sync.shared_files import try_lock

_LEAVE_SECONDS = 2.0
"""How long a core may take to see by itself that its owner is gone."""
_KILLED_SECONDS = 10.0
_POLL_SECONDS = 0.02


def remove_core(directory: str, pid: int) -> None:
    """End the core that lives in `directory` as process `pid`, if its owner's end did not, and remove its files.

    It waits for the process to be gone. Nobody else's process is hit: a core locks a file of its directory for as long
    as it lives, and only the lock's holder is killed.
    """
    if not _is_gone(directory, _LEAVE_SECONDS):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _is_gone(directory, _KILLED_SECONDS)
    remove_directories(directory)
    shutil.rmtree(directory, ignore_errors=True)


def _is_gone(directory: str, seconds: float) -> bool:
    """Wait until no core holds the directory's lock; False if one still does after `seconds`."""
    deadline = time.monotonic() + seconds
    while _is_held(directory):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _is_held(directory: str) -> bool:
    try:
        descriptor = open_file(Path(directory) / "lock", os.O_RDWR)
    except OSError:  # the core has removed it
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)
