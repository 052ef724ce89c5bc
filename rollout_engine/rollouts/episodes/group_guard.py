"""Kills process groups when this process ends, however it does: a shell reads their numbers until its input ends.

A process that is killed ends nothing, and a signal of the system (`rollout_engine.base.parent_death`) reaches its
children alone, not what these have started.
"""

import os
import subprocess
import threading
from contextlib import suppress

_SCRIPT = 'while read -r last; do groups=$last; done; for group in $groups; do kill -s KILL -- "-$group"; done'
"""Each line that it reads has all groups."""


class GroupGuard:
    """The groups of this process's children to kill at its end. The shell runs as long as there are any.

    Best effort: without a shell, the groups of a process that is killed stay.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[int] = set()
        self._shell: subprocess.Popen[bytes] | None = None
        os.register_at_fork(after_in_child=self._forget)

    def add(self, group: int) -> None:
        """Kill this group, too."""
        with self._lock:
            self._groups.add(group)
            self._update()

    def remove(self, group: int) -> None:
        """Leave this group alone, which has ended; no-op if it is not guarded."""
        with self._lock:
            if group in self._groups:
                self._groups.discard(group)
                self._update()

    def _update(self) -> None:
        with suppress(OSError):
            if self._shell is None or self._shell.poll() is not None:
                self._shell = subprocess.Popen(
                    ["/bin/sh", "-c", _SCRIPT],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    bufsize=0,
                )
            assert self._shell.stdin is not None
            self._shell.stdin.write(" ".join(map(str, self._groups)).encode() + b"\n")
            if not self._groups:
                self._shell.stdin.close()
                self._shell.wait()
                self._shell = None

    def _forget(self) -> None:
        """Begin anew in a forked child: the groups are its parent's, whose end its copy of the pipe would hide."""
        shell, self._shell = self._shell, None
        self._lock, self._groups = threading.Lock(), set()
        if shell is not None and shell.stdin is not None:
            shell.stdin.close()
            shell.returncode = 0  # it is no child of this process
