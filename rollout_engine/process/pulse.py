"""Signs of life of a core's process, in a file of its directory: both ends in this file. And those of one on TCP.

    beats    counted by a native thread, whatever the interpreter does
    turns    of the socket's loop, counted by the interpreter
    steps    of the busy loop, counted by the interpreter

A process that is stopped changes none of them. One whose interpreter is held, by a call into C or the collection of
garbage, beats and makes neither turns nor steps: it is alive, and busy.
"""

import ctypes
import logging
import math
import mmap
import os
import socket
from abc import ABC, abstractmethod
from pathlib import Path

import zmq

from rollout_engine.kernels.cpu.heartbeat import start_heartbeat
from rollout_engine.process.strangers import GREETING

logger = logging.getLogger("rollout_engine")

_FILE = "pulse"
_NUM_BYTES = 24
_BEATS, _TURNS, _STEPS = range(3)
_ORPHAN_SECONDS = 5.0
"""How long a core that has lost its parent may take to end."""
_BEAT_SECONDS = 0.5
"""How often zmq asks a core on TCP for a sign of life."""
_GRACE_SECONDS = 0.1
"""How much later the end of a process may show on one connection than on another: it was no silence then."""
_pulses: "list[Pulse]" = []
"""Those of this process, kept until its end: its native thread writes to their memory until it ends."""


class Pulse:
    """The core's end: it counts. Without native code only the interpreter counts, and a log line reports it."""

    def __init__(self, directory: str, lifeline: socket.socket) -> None:
        file = os.open(Path(directory) / _FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, _NUM_BYTES)
            self._memory = mmap.mmap(file, _NUM_BYTES)
        finally:
            os.close(file)
        self._counts = (ctypes.c_uint64 * 3).from_buffer(self._memory)
        _pulses.append(self)
        counts = ctypes.addressof(self._counts)
        try:
            self.is_native = start_heartbeat(counts, lifeline.fileno(), directory, _ORPHAN_SECONDS)
        except OSError as problem:
            logger.warning("%s", problem)
            self.is_native = False
        if not self.is_native:
            logger.warning("the heartbeat runs in the interpreter: a long call into C will look like a core that hangs")

    def turn(self) -> None:
        """Count a turn of the socket's loop."""
        self._counts[_TURNS] += 1

    def step(self) -> None:
        """Count a step of the busy loop."""
        self._counts[_STEPS] += 1


class SignsOfLife(ABC):
    """How long a core's process, and its interpreter, have given no sign of life, as a client sees it."""

    where_stopped = "its process is stopped, or gets no CPU time"
    """Possible reason for a process's silence."""

    def __init__(self, now: float) -> None:
        self._has_warned = False
        self.alive_at = self.interpreter_at = now
        """When the process, and the interpreter, last gave a sign."""

    @abstractmethod
    def look(self, now: float, *, heard: bool) -> None:
        """Look for signs; `heard`: a message has arrived, which is one of both."""

    def silence(self, now: float, hang_seconds: float, step_deadline: float) -> str | None:
        """Why the core counts as dead: its process or its interpreter has been silent too long. None: it does not."""
        silent, held = now - self.alive_at, now - self.interpreter_at
        if silent > hang_seconds:
            return f"it has given no sign of life for {hang_seconds:g} s: {self.where_stopped}"
        what = f"its process lives, but its interpreter has been held for {held:.1f} s, by a call into C"
        if held > step_deadline:
            return f"{what} that does not return (step_deadline={step_deadline:g} s)"
        if held > hang_seconds and not self._has_warned:
            self._has_warned = True
            logger.warning("a core is busy: %s or the collection of garbage", what)
        return None

    @abstractmethod
    def close(self) -> None:
        """Stop looking."""

    def _interpreter_lives(self, now: float) -> None:
        self.interpreter_at = now
        self._has_warned = False


class PulseReader(SignsOfLife):
    """The signs in the file of a core on this machine; one that has no such file lives by its messages."""

    def __init__(self, directory: str, now: float) -> None:
        super().__init__(now)
        try:
            self._file = os.open(Path(directory) / _FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            self._file = -1
        self._last = b""

    def look(self, now: float, *, heard: bool) -> None:
        """Read the counts."""
        counts = b"" if self._file < 0 else os.pread(self._file, _NUM_BYTES, 0)
        if heard or counts != self._last:
            self.alive_at = now
        if heard or counts[8:] != self._last[8:]:
            self._interpreter_lives(now)
        self._last = counts

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class RemotePulse(SignsOfLife):
    """The signs of a core on TCP: a second connection, over which only zmq's own heartbeats go.

    A thread of zmq answers them in the core, whatever its interpreter does. The client's other connection will not do:
    while a core or a client leaves its messages unread, as a busy one may, zmq does not read its heartbeats either.
    """

    where_stopped = "its process is stopped, or gets no CPU time, or the network to it is cut"

    def __init__(self, socket: zmq.Socket[bytes], address: str, hang_seconds: float, now: float) -> None:
        """Connect `socket`, which has its keys, to `address`."""
        super().__init__(now)
        interval = min(_BEAT_SECONDS, hang_seconds / 4)
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * interval))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * (hang_seconds - interval)))
        self._socket, self._monitor = socket, socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._lost_at = math.inf
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send(GREETING, zmq.NOBLOCK)

    def look(self, now: float, *, heard: bool) -> None:
        """Look whether zmq has given the connection up."""
        if self._lost_at == math.inf and self._monitor.poll(0):
            self._lost_at = now
        if now - self._lost_at > _GRACE_SECONDS:
            self.alive_at = -math.inf
        else:
            self.alive_at = now
        if heard:
            self._interpreter_lives(now)

    def close(self) -> None:
        """End the connection."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
