"""A weight update whose verbs come as calls, one by one: the transaction, and the engine's knowledge of it, in step.

    begin ── core.begin_update ── updater.begin ... commit ── updater.commit ── core.commit_version ── updater.confirm,
             │                                                                                         core.end_update
             └── refused: as before                 abort, caller_left ── updater.abort ────────────── core.end_update
                                                    or the end of its time

Verbs run on threads beside the busy loop; what they tell the core, they tell it at a step boundary.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Literal, Protocol

from torch import Tensor

from rollout_engine.errors import LifecycleError
from rollout_engine.execution.weights import WeightUpdater
from rollout_engine.metrics import CoreStats
from sync.base import WeightReceiver
from sync.errors import SyncError, TransferTimeout
from sync.manifest import WeightManifest


class Core(Protocol):
    """What is told of an update: the engine's core."""

    @property
    def stats(self) -> CoreStats:
        """Where updates are counted."""
        ...

    def begin_update(self, verb: str) -> None:
        """One is under way. Raises `LifecycleError`, naming `verb`, where it cannot be."""

    def commit_version(self, version: int, kv: Literal["keep", "recompute"]) -> int:
        """The weights are now `version`'s."""
        ...

    def end_update(self, *, dirty: bool | None) -> None:
        """It has ended; `dirty`: the weights are a mixture, None: as before."""


class CalledUpdate:
    """The one update that calls may have open. Satisfies `worker_ext.base.WeightTransaction`."""

    def __init__(self, updater: WeightUpdater) -> None:
        self._updater = updater
        self._open: _Open | None = None
        self._core: Core | None = None
        self._boundary: Callable[[], AbstractContextManager[object]] | None = None
        self._calling = threading.Lock()
        self._caller: ContextVar[int | None] = ContextVar("caller", default=None)
        """Of the call that runs on this thread."""
        self._gone: set[int] = set()
        """Callers that have left."""
        self._late: dict[int | None, str] = {}
        """Caller -> what became of its update, which its next call is told."""
        self._receiver: WeightReceiver | None = None
        """Which a call waits for now."""

    @contextmanager
    def called_by(self, caller: int | None) -> Iterator[None]:
        """Whose calls those inside are."""
        token = self._caller.set(caller)
        try:
            yield
        finally:
            self._caller.reset(token)

    def caller_left(self, caller: int) -> None:
        """Roll back what `caller` has begun, once the call that is at work on it, and is interrupted, has returned."""
        self._gone.add(caller)
        self._late.pop(caller, None)
        self._roll_back(lambda update: update.caller == caller, "ClientLeft")

    def close(self) -> None:
        """The worker ends, and with it what is open."""
        if self._open is not None:
            self._open.close()

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
        return self._opened(verb).manifest

    def begin(
        self, manifest: WeightManifest, *, reset_version: bool, timeout: float = 300.0, partial: bool = False
    ) -> bool:
        """As `WeightUpdater.begin`; `LifecycleError` too where the engine cannot take an update now.

        `timeout`: seconds to the commit; then the update is aborted, and the caller's next verb is told.
        """
        if not 0 < timeout <= threading.TIMEOUT_MAX:
            raise SyncError(f"timeout={timeout} is not allowed: must be seconds, more than 0.")
        with self._call("begin_weight_update"):
            caller = self._caller.get()
            self._late.pop(caller, None)
            if caller in self._gone:
                raise LifecycleError("begin_weight_update: the client that called it has left.")
            with self._at_boundary() as core:
                core.begin_update("begin_weight_update")
            self._open = _Open(manifest, caller)
            try:
                begun = self._updater.begin(manifest, reset_version=reset_version, partial=partial)
            except BaseException as problem:
                self._end(dirty=None, failure=type(problem).__name__)
                raise
            if begun:
                self._open.end_after(timeout, self._expire)
            else:
                self._end(dirty=None)
            return begun

    def stage(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """As `WeightUpdater.stage`."""
        with self._call("stage"), self._opened("stage").noting():
            self._updater.stage(pairs)

    def receive(self, receiver: WeightReceiver, manifest: WeightManifest | None = None) -> None:
        """As `WeightUpdater.receive`. `TransferTimeout` once the caller that began the update has left."""
        with self._call("receive"), self._opened("receive").noting():
            self._receiver = receiver
            try:
                self._check()
                self._updater.receive(receiver, manifest, check=lambda name: self._check())
            finally:
                self._receiver = None

    def verify(self) -> str:
        """As `WeightUpdater.verify`."""
        with self._call("verify_weights"), self._opened("verify_weights").noting():
            return self._updater.verify()

    def commit(self, version: int, kv: Literal["keep", "recompute"]) -> str:
        """As `WeightUpdater.commit`. Refused, the update stays open."""
        with self._call("commit_weight_update"), self._opened("commit_weight_update").noting() as update:
            try:
                with self._at_boundary() as core:
                    start = time.perf_counter()
                    self._updater.commit(version)
                    core.commit_version(version, kv)
                    update.stall_seconds = time.perf_counter() - start
                digest = self._updater.confirm()
            except BaseException as problem:
                if not self._updater.is_open:
                    self._end(dirty=self._updater.dirty, failure=type(problem).__name__)
                raise
            self._end(dirty=self._updater.dirty, num_bytes=update.manifest.num_bytes)
            return digest

    def abort(self) -> None:
        """As `WeightUpdater.abort`; leaves an update alone that no call has begun."""
        with self._call("abort_weight_update"):
            self._late.pop(self._caller.get(), None)
            if self._open is not None:
                self._updater.abort()
                self._end(dirty=None, failure=self._open.failure or "Aborted")

    def _check(self) -> None:
        if self._open is not None and self._open.caller in self._gone:
            raise TransferTimeout("The client that began the update has left.")
        if self._open is not None and self._open.late:
            raise TransferTimeout(self._open.late)

    def _expire(self, late: "_Open") -> None:
        self._roll_back(lambda update: update is late, "TransferTimeout")

    def _roll_back(self, is_meant: "Callable[[_Open], bool]", failure: str) -> None:
        """The open update, if it is meant, once the call that is at work on it, and is interrupted, has returned."""
        receiver, update = self._receiver, self._open
        if receiver is not None and update is not None and is_meant(update):
            receiver.close()
        with self._calling:
            if self._open is not None and is_meant(self._open):
                if self._open.late:
                    self._late[self._open.caller] = self._open.late
                self._updater.abort()
                self._end(dirty=None, failure=failure)

    def _opened(self, verb: str) -> "_Open":
        late = self._late.pop(self._caller.get(), None)
        if late is not None:
            raise TransferTimeout(f"{verb}: {late}")
        if self._open is None:
            raise LifecycleError(f"{verb}: no update is open; call begin_weight_update first.")
        return self._open

    def _end(self, *, dirty: bool | None, failure: str | None = None, num_bytes: int = 0) -> None:
        """`failure`: why it was not completed."""
        assert self._open is not None, "what ends was open"
        update, self._open = self._open, None
        update.close()
        with self._at_boundary() as core:
            updates = core.stats.updates
            if failure is not None:
                updates.add_failure(failure)
            else:
                updates.add_complete(time.perf_counter() - update.start, update.stall_seconds, num_bytes)
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


class _Open:
    """An update between its begin and its end."""

    def __init__(self, manifest: WeightManifest, caller: int | None) -> None:
        self.manifest, self.caller = manifest, caller
        self.start, self.stall_seconds = time.perf_counter(), 0.0
        self.failure: str | None = None
        """Class of the last error of a verb."""
        self.late = ""
        """Once its time is over: what its caller is told."""
        self._timer: threading.Timer | None = None

    def end_after(self, timeout: float, end: Callable[["_Open"], object]) -> None:
        """Call `end(self)`, on a thread of its own, after `timeout` seconds, unless it has ended by then."""

        def expire() -> None:
            what = f"The update to version {self.manifest.version} was not committed within {timeout:g} s"
            self.late = f"{what} and is aborted: begin it again, with a longer timeout."
            end(self)

        self._timer = threading.Timer(timeout, expire)
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        """It has ended."""
        if self._timer is not None:
            self._timer.cancel()

    @contextmanager
    def noting(self) -> Iterator["_Open"]:
        """Around a verb."""
        try:
            yield self
        except Exception as problem:
            self.failure = type(problem).__name__
            raise
