"""Signs of life of a core's process, in a file of its directory: both ends in this file.

    beats    counted by a native thread, whatever the interpreter does
    turns    of the socket's loop, counted by the interpreter
    steps    of the busy loop, counted by the interpreter

A process that is stopped changes none of them. One whose interpreter is held, by a call into C or the collection of
garbage, beats and makes neither turns nor steps: it is alive, and busy.
"""

import ctypes
import logging
import mmap
import os
import socket
from pathlib import Path

from rollout_engine.kernels.cpu.heartbeat import start_heartbeat

logger = logging.getLogger("rollout_engine")

_FILE = "pulse"
_NUM_BYTES = 24
_BEATS, _TURNS, _STEPS = range(3)
_ORPHAN_SECONDS = 5.0
"""How long a core that has lost its parent may take to end by itself."""
_pulses: "list[Pulse]" = []
"""Those of this process, for ever: its native thread writes to their memory until it ends."""


class Pulse:
    """The core's end: it counts. Without native code only the interpreter counts, and a log line says so."""

    def __init__(self, directory: str, lifeline: socket.socket) -> None:
        file = os.open(Path(directory) / _FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, _NUM_BYTES)
            self._memory = mmap.mmap(file, _NUM_BYTES)
        finally:
            os.close(file)
        self._counts = (ctypes.c_uint64 * 3).from_buffer(self._memory)
        _pulses.append(self)
        try:
            is_native = start_heartbeat(ctypes.addressof(self._counts), lifeline.fileno(), directory, _ORPHAN_SECONDS)
        except OSError as problem:
            logger.warning("%s", problem)
            is_native = False
        if not is_native:
            logger.warning("the heartbeat runs in the interpreter: a long call into C will look like a core that hangs")

    def turn(self) -> None:
        """Count a turn of the socket's loop."""
        self._counts[_TURNS] += 1

    def step(self) -> None:
        """Count a step of the busy loop."""
        self._counts[_STEPS] += 1


class PulseReader:
    """A client's end: how long a core's process, and its interpreter, have given no sign of life.

    A message of the core is a sign of both, also of a core that has no such file.
    """

    def __init__(self, directory: str, now: float) -> None:
        try:
            self._file = os.open(Path(directory) / _FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            self._file = -1
        self._last = b""
        self._has_warned = False
        self.alive_at = self.interpreter_at = now
        """When the process, and the interpreter, last gave a sign."""

    def look(self, now: float, *, heard: bool) -> None:
        """Read the counts; `heard`: a message has arrived."""
        counts = b"" if self._file < 0 else os.pread(self._file, _NUM_BYTES, 0)
        if heard or counts != self._last:
            self.alive_at = now
        if heard or counts[8:] != self._last[8:]:
            self.interpreter_at = now
            self._has_warned = False
        self._last = counts

    def silence(self, now: float, hang_seconds: float, step_deadline: float) -> str | None:
        """Why the core counts as dead: its process or its interpreter has been silent too long. None: it does not."""
        silent, held = now - self.alive_at, now - self.interpreter_at
        if silent > hang_seconds:
            return f"it has given no sign of life for {hang_seconds:g} s: its process is stopped, or gets no CPU time"
        what = f"its process lives, but its interpreter has been held for {held:.1f} s, by a call into C"
        if held > step_deadline:
            return f"{what} that does not return (step_deadline={step_deadline:g} s)"
        if held > hang_seconds and not self._has_warned:
            self._has_warned = True
            logger.warning("a core is busy: %s or the collection of garbage", what)
        return None

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
