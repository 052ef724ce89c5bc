"""Worker processes between two rollouts, so that the next one need not import its environments again."""

import hashlib
import os
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from rollout_engine.rollouts.episodes.factory_reference import FactoryReference
from rollout_engine.rollouts.episodes.worker_process import WorkerProcess

_MAX_KEPT = 32


class _Kept(NamedTuple):
    start: bytes
    """The digest from `start_of` when it started."""
    process: WorkerProcess


class KeptWorkers:
    """Idle worker processes with a factory loaded, at most `max_kept`; one more ends the one that has waited longest.

    Each ends itself when it has had nothing to do for a minute. All end with `close`, with this object, or with the
    interpreter.
    """

    def __init__(self, max_kept: int = _MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._lock = threading.Lock()
        self._idle: list[_Kept] = []
        """Idle processes, the one that has waited longest first."""
        self._end_idle = weakref.finalize(self, _end_idle, self._idle)

    def take(self, start: bytes) -> WorkerProcess | None:
        """Take out the process of this `start_of` that has waited least; None if there is none."""
        with self._lock:
            kept = next((kept for kept in reversed(self._idle) if kept.start == start), None)
            if kept is not None:
                self._idle.remove(kept)
        return kept and kept.process

    def give(self, start: bytes, process: WorkerProcess) -> None:
        """Keep a process whose episodes are all closed, or end it if it cannot be reused."""
        with self._lock:
            found = [*self._idle, _Kept(start, process)]
            sound = [kept for kept in found if kept.process.is_sound]
            self._idle[:] = sound[max(0, len(sound) - self._max_kept) :]
            leaving = [kept for kept in found if kept not in self._idle]
        _end(leaving)

    def close(self) -> None:
        """End all processes, and keep none from here on."""
        with self._lock:
            self._max_kept = 0
        self._end_idle()


def start_of(reference: FactoryReference) -> bytes:
    """Digest of all that a worker process starts with if it is started now. Processes of one digest are alike."""
    directory = os.stat(".")
    start = [reference, sorted(os.environb.items()), directory.st_dev, directory.st_ino]
    return hashlib.blake2b(msgspec.msgpack.encode(start), digest_size=16).digest()


def _end_idle(idle: list[_Kept]) -> None:
    _end(idle)
    idle.clear()


def _end(leaving: Sequence[_Kept]) -> None:
    for kept in leaving:
        kept.process.ask_to_end()
    for kept in leaving:
        kept.process.end()
