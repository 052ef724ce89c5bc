"""A weight update whose verbs come as calls, one by one: the transaction, and the engine's knowledge of it, in step.

    begin ── core.begin_update ── updater.begin ......... commit ── updater.commit ── core.commit_version, end_update
             └── refused: as before                       abort ─── updater.abort ──────────────────────── end_update

Verbs run on threads beside the busy loop; what they tell the core, they tell it at a step boundary.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, Protocol

from torch import Tensor

from rollout_engine.errors import LifecycleError
from rollout_engine.execution.weights import WeightUpdater
from sync.manifest import WeightManifest


class Core(Protocol):
    """What is told of an update: the engine's core."""

    def begin_update(self) -> None:
        """One is under way. Raises `LifecycleError` where it cannot be."""

    def commit_version(self, version: int, kv: Literal["keep", "recompute"]) -> int:
        """The weights are now `version`'s."""
        ...

    def end_update(self, *, dirty: bool | None) -> None:
        """It has ended; `dirty`: the weights are a mixture, None: as before."""


class CalledUpdate:
    """The one update that calls may have open. Satisfies `worker_ext.base.WeightTransaction`."""

    def __init__(self, updater: WeightUpdater) -> None:
        self._updater = updater
        self._manifest: WeightManifest | None = None
        self._core: Core | None = None
        self._boundary: Callable[[], AbstractContextManager[object]] | None = None
        self._calling = threading.Lock()

    def follow(self, core: Core, boundary: Callable[[], AbstractContextManager[object]]) -> None:
        """Tell `core`, inside `boundary()`, which keeps steps out."""
        self._core, self._boundary = core, boundary

    def metadata(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of every accepted name."""
        return self._updater.metadata()

    def digest(self) -> str:
        """Of the live weights."""
        return self._updater.digest()

    def manifest(self, verb: str) -> WeightManifest:
        """Of the open update. `LifecycleError` naming `verb` without one."""
        if self._manifest is None:
            raise LifecycleError(f"{verb}: no update is open; call begin_weight_update first.")
        return self._manifest

    def begin(self, manifest: WeightManifest, *, reset_version: bool) -> bool:
        """As `WeightUpdater.begin`; `LifecycleError` too where the engine cannot take an update now."""
        with self._call("begin_weight_update"):
            with self._at_boundary() as core:
                core.begin_update()
            begun = False
            try:
                begun = self._updater.begin(manifest, reset_version=reset_version)
            finally:
                if begun:
                    self._manifest = manifest
                else:
                    self._end(dirty=None)
            return begun

    def stage(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """As `WeightUpdater.stage`."""
        with self._call("stage"):
            self.manifest("stage")
            self._updater.stage(pairs)

    def verify(self) -> str:
        """As `WeightUpdater.verify`."""
        with self._call("verify_weights"):
            self.manifest("verify_weights")
            return self._updater.verify()

    def commit(self, version: int, kv: Literal["keep", "recompute"]) -> str:
        """As `WeightUpdater.commit`. Refused, the update stays open."""
        with self._call("commit_weight_update"):
            self.manifest("commit_weight_update")
            try:
                with self._at_boundary() as core:
                    digest = self._updater.commit(version)
                    core.commit_version(version, kv)
            finally:
                if not self._updater.is_open:
                    self._end(dirty=self._updater.dirty)
            return digest

    def abort(self) -> None:
        """As `WeightUpdater.abort`; leaves an update alone that no call has begun."""
        with self._call("abort_weight_update"):
            if self._manifest is not None:
                self._updater.abort()
                self._end(dirty=None)

    def _end(self, *, dirty: bool | None) -> None:
        self._manifest = None
        with self._at_boundary() as core:
            core.end_update(dirty=dirty)

    @contextmanager
    def _at_boundary(self) -> Iterator[Core]:
        assert self._core is not None and self._boundary is not None, "the engine has attached itself"
        with self._boundary():
            yield self._core

    @contextmanager
    def _call(self, verb: str) -> Iterator[None]:
        if not self._calling.acquire(blocking=False):
            raise LifecycleError(f"{verb}: another call is at work on the open update; wait until it has returned.")
        try:
            yield
        finally:
            self._calling.release()
