"""Kills process groups and removes directories when this process ends, however it does: a shell waits for its end.

A process that is killed ends nothing, and the signal of the system (`rollout_engine.children.process`) reaches its
children alone: not the processes that these have started, nor their files, which a child that is killed cannot remove.
"""

import os
import shlex
import subprocess
import threading
from contextlib import suppress

_SCRIPT = 'while read -r last; do work=$last; done; eval "$work"'
"""Each line that it reads is all that is to be done."""
_REMOVE = "for try in 1 2 3 4 5 6 7 8 9; do rm -rf -- {} && break; sleep 0.1; done"
"""Again while a process that has just been killed may still make a file."""


class Guard:
    """Groups to kill and paths to remove at the end of this process. The shell runs as long as there are any.

    Best effort: without a shell, the groups and paths of a process that is killed stay.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[int] = set()
        self._paths: dict[str, str] = {}
        """Path -> the words of a shell that stand for it."""
        self._shell: subprocess.Popen[bytes] | None = None
        os.register_at_fork(after_in_child=self._forget)

    def add_group(self, group: int) -> None:
        """Kill this process group, too."""
        with self._lock:
            self._groups.add(group)
            self._update()

    def drop_group(self, group: int) -> None:
        """Leave this group alone, which has ended; no-op if it is not guarded."""
        with self._lock:
            if group in self._groups:
                self._groups.discard(group)
                self._update()

    def add_path(self, path: str, prefix: str = "") -> None:
        """Remove this path, too, with all that is in it, and all paths that begin with `prefix`."""
        with self._lock:
            self._paths[path] = shlex.quote(path) + (f" {shlex.quote(prefix)}*" if prefix else "")
            self._update()

    def drop_path(self, path: str) -> None:
        """Leave this path alone, which is removed; no-op if it is not guarded."""
        with self._lock:
            if self._paths.pop(path, None) is not None:
                self._update()

    def _update(self) -> None:
        groups = " ".join(f"-{group}" for group in self._groups)
        paths = " ".join(words for words in self._paths.values() if "\n" not in words)
        work = [f"kill -s KILL -- {groups}"] * bool(groups) + [_REMOVE.format(paths)] * bool(paths)
        with suppress(OSError):
            if self._shell is None or self._shell.poll() is not None:
                self._shell = self._start_shell() if work else None
            if self._shell is not None:
                assert self._shell.stdin is not None
                self._shell.stdin.write(os.fsencode("; ".join(work) + "\n"))
                if not work:
                    self._shell.stdin.close()
                    self._shell.wait()
                    self._shell = None

    def _start_shell(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def _forget(self) -> None:
        """Begin anew in a forked child: all is its parent's, whose end its copy of the pipe would hide."""
        shell, self._shell = self._shell, None
        self._lock, self._groups, self._paths = threading.Lock(), set(), {}
        if shell is not None and shell.stdin is not None:
            shell.stdin.close()
            shell.returncode = 0  # it is no child of this process


GUARD = Guard()
"""That of this process."""
