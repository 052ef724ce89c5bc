"""Signs of life of an engine's other ranks: bytes over a socket of their own. Both ends in this file.

    rank ── a byte, ten times a second, sent by a native thread ──> rank 0

A rank that is stopped sends none. One that computes in C for minutes, or holds its interpreter, still does.
"""

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from rollout_engine.base.threads import start_thread
from rollout_engine.children.channel import Channel
from rollout_engine.kernels.cpu.heartbeat import INTERVAL_SECONDS, start_heartbeat

logger = logging.getLogger("rollout_engine")

HANG_SECONDS = 4.5
"""Silence after which a rank counts as dead."""
_FIRST_SECONDS = 300.0
"""How long a rank may take to its first sign: it imports this package, and may have to build the kernels."""
_LOOK_SECONDS = 0.25
_ORPHAN_SECONDS = 5.0
"""How long a rank that has lost rank 0 may take to end on its own."""
_READ_BYTES = 4096


class BeatingRank(Protocol):
    """A rank as `PulseWatch` sees it."""

    name: str
    pulse: Channel


def start_pulse(pulse: Channel) -> None:
    """Start the signs of life of this process, which the thread ends if it outlives rank 0."""
    try:
        is_native = start_heartbeat(None, pulse.socket.fileno(), "", _ORPHAN_SECONDS)
    except OSError as problem:
        logger.warning("%s", problem)
        is_native = False
    if not is_native:
        logger.warning("the heartbeat runs in the interpreter: a long call into C will look like a rank that hangs")
        start_thread(_beat, pulse.socket, name="pulse")


class PulseWatch:
    """A thread that calls `on_silence` with a rank and the reason, once that rank gives no sign of life."""

    def __init__(
        self, ranks: Sequence[BeatingRank], on_silence: Callable[[BeatingRank, str], object], *, is_remote: bool
    ) -> None:
        """`is_remote`: whether there is a network between the ranks."""
        self._on_silence, self._is_remote = on_silence, is_remote
        self._is_over = threading.Event()
        now = time.monotonic()
        self._last = [(rank, now, _FIRST_SECONDS) for rank in ranks]
        """Each rank, when it gave its last sign, and how long it may take to the next."""
        self._looked = now
        start_thread(self._run, name="rank-pulses")

    def end(self) -> None:
        """Look no more."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_SECONDS):
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        stood_still = now - self._looked > HANG_SECONDS / 2  # this process did, so silence means nothing
        self._looked, last = now, []
        for rank, at, limit in self._last:
            count = _num_waiting(rank.pulse.socket)
            if count:
                at, limit = now, HANG_SECONDS
            elif stood_still:
                at = now
            if count is None:
                continue  # its end, which the watcher of its life notices
            if now - at > limit:
                network = ", or the network to it is cut" if self._is_remote else ""
                reason = f"its process is stopped, or gets no CPU time{network}"
                self._on_silence(rank, f"has given no sign of life for {limit:g} s: {reason}")
                at = math.inf
            last.append((rank, at, limit))
        self._last = last


def _num_waiting(end: socket.socket) -> int | None:
    """Read the bytes that have arrived. Returns their number; None if the other end is gone."""
    try:
        return len(end.recv(_READ_BYTES, socket.MSG_DONTWAIT)) or None
    except BlockingIOError:
        return 0
    except OSError:
        return None


def _beat(end: socket.socket) -> None:
    """Send signs of life if no native thread does."""
    with suppress(OSError):
        while True:
            with suppress(BlockingIOError):
                end.send(b"\0", socket.MSG_DONTWAIT)
            time.sleep(INTERVAL_SECONDS)
