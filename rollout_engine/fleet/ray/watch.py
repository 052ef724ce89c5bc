"""Asks the actors of all replicas for signs of life, on one thread.

A core's own clients detect that it ends or hangs. This watch detects the rest: the status that it ended with, and that
its actor is gone, and with it the process that would end the core.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from rollout_engine.base.errors import EngineDeadError, RetryableError
from rollout_engine.base.threads import start_thread
from rollout_engine.fleet.ray.core import RemoteCore

logger = logging.getLogger("rollout_engine")

_PERIOD_SECONDS = 1.0
_SILENT_SECONDS = 10.0
"""An actor that does not answer for this long is reported. It is left alone: its core may serve well without it."""


class _Watched:
    """Last signs of life of one actor."""

    def __init__(self, core: RemoteCore) -> None:
        self.core = core
        self.asked: Any = None
        self.heard_at = time.monotonic()
        self.is_reported = False


class ActorWatch:
    """The thread that asks, once a second, until `close`. It calls `on_lost` with each core whose actor is gone."""

    def __init__(self, on_lost: Callable[[RemoteCore], object]) -> None:
        self._on_lost = on_lost
        self._watched: dict[RemoteCore, _Watched] = {}
        self._closing = threading.Event()
        self._thread = start_thread(self._run, name="ray-heartbeats")

    def add(self, core: RemoteCore) -> None:
        """Watch the actor of a core that is ready."""
        self._watched[core] = _Watched(core)

    def remove(self, core: RemoteCore) -> None:
        """Watch it no more; no-op for one that is not watched."""
        self._watched.pop(core, None)

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_PERIOD_SECONDS):
            for watched in list(self._watched.values()):
                try:
                    self._look(watched)
                except EngineDeadError as error:
                    self.remove(watched.core)
                    logger.warning("%s", error)
                    self._on_lost(watched.core)

    def _look(self, watched: _Watched) -> None:
        """Read the answer that is due, and ask again. Raises `EngineDeadError` if the actor is gone."""
        core, beat = watched.core, None
        try:
            if watched.asked is not None:
                beat = core.read_heartbeat(watched.asked)
            if watched.asked is None or beat is not None:
                watched.asked = core.ask_heartbeat()
        except RetryableError:  # whether that one ran does not matter: ask again
            watched.asked = None
        if beat is not None and beat.status is not None:
            self.remove(core)
            logger.warning("%s: its core has ended with status %d", core.name, beat.status)
        self._report(watched, is_heard=beat is not None)

    def _report(self, watched: _Watched, *, is_heard: bool) -> None:
        now = time.monotonic()
        silence, name = now - watched.heard_at, watched.core.name
        if is_heard:
            watched.heard_at = now
            if watched.is_reported:
                logger.warning("%s: its actor answers again, after %.0f s", name, silence)
            watched.is_reported = False
        elif silence > _SILENT_SECONDS and not watched.is_reported:
            watched.is_reported = True
            logger.warning("%s: its actor has not answered for %.0f s; its core serves on", name, silence)
