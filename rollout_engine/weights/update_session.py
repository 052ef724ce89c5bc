"""A weight update whose verbs are separate calls. The engine's core is notified when it begins, commits and ends.

    begin ── core.begin_update ── updater.begin ... commit ── updater.commit ── core.commit_version ── updater.confirm,
             │                                                                                         core.end_update
             └── refused: nothing changed          abort, caller_left ── updater.abort ────────────── core.end_update
                                                   or its timeout

Verbs run on threads of their own, not in the busy loop, and call the core at a step boundary.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Literal, Protocol

from torch import Tensor

from rollout_engine.base.errors import LifecycleError
from rollout_engine.base.messages import UpdateOptions
from rollout_engine.base.metrics import CoreStats
from rollout_engine.base.threads import start
from rollout_engine.weights.transaction import WeightUpdater
from sync.base import WeightReceiver
from sync.errors import SyncError, TransferTimeout
from sync.manifest import WeightManifest


class Core(Protocol):
    """The engine's core, as far as an update concerns it."""

    @property
    def stats(self) -> CoreStats:
        """Statistics in which updates are counted."""
        ...

    def begin_update(self, verb: str) -> None:
        """Enter UPDATING. Raises `LifecycleError`, naming `verb`, if the engine cannot take an update now."""

    def commit_version(self, version: int, kv: Literal["keep", "recompute"]) -> int:
        """Make `version` the live one."""
        ...

    def end_update(self, *, dirty: bool | None) -> None:
        """Leave UPDATING. `dirty`: whether the weights are incomplete now; None: as before the update."""


class UpdateSession:
    """Takes the verbs of one update at a time. Satisfies `worker_ext.base.WeightTransaction`.

    Verbs raise as those of `WeightUpdater`, and `LifecycleError` while another call is at work on the update.
    """

    def __init__(self, updater: WeightUpdater) -> None:
        self._updater = updater
        self._open: _OpenUpdate | None = None
        self._core: Core | None = None
        self._boundary: Callable[[], AbstractContextManager[object]] | None = None
        self._call_lock = threading.Lock()
        """Held while a verb is at work."""
        self._caller: ContextVar[int | None] = ContextVar("caller", default=None)
        """The client whose call runs on this thread."""
        self._departed: set[int] = set()
        """Clients that have left."""
        self._expired: dict[int | None, str] = {}
        """Client -> why its update was aborted, for its next verb to raise."""
        self._receiver: WeightReceiver | None = None
        """The receiver that a call waits for now."""

    @contextmanager
    def called_by(self, caller: int | None) -> Iterator[None]:
        """Attribute the calls inside to a client."""
        token = self._caller.set(caller)
        try:
            yield
        finally:
            self._caller.reset(token)

    def caller_left(self, caller: int) -> None:
        """Roll back the update that `caller` has begun. A call that is at work on it is interrupted and waited for."""
        self._departed.add(caller)
        self._expired.pop(caller, None)
        self._roll_back(lambda update: update.caller == caller, "ClientLeft")

    def close(self) -> None:
        """Drop the open update's timer: the worker shuts down."""
        if self._open is not None:
            self._open.timer.cancel()

    def attach_core(self, core: Core, boundary: Callable[[], AbstractContextManager[object]]) -> None:
        """Report updates to `core`, inside `boundary()`, which keeps steps out."""
        self._core, self._boundary = core, boundary

    def metadata(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return self._updater.metadata()

    def digest(self) -> str:
        return self._updater.digest()

    def manifest(self, verb: str) -> WeightManifest:
        return self._require_open(verb).manifest

    def begin(
        self, manifest: WeightManifest, *, reset_version: bool, timeout: float = 300.0, partial: bool = False
    ) -> bool:
        """Begin an update, as `WeightUpdater.begin` does. Raises `LifecycleError` too if one is not possible now.

        After `timeout` seconds without a commit the update is aborted, and the caller's next verb raises.
        """
        if not 0 < timeout <= threading.TIMEOUT_MAX:
            raise SyncError(f"timeout={timeout} is not allowed: must be seconds, more than 0.")
        with self._exclusive("begin_weight_update"):
            caller = self._caller.get()
            self._expired.pop(caller, None)
            if caller in self._departed:
                raise LifecycleError("begin_weight_update: the client that called it has left.")
            update = _OpenUpdate(manifest, caller, timeout, self._expire)
            start(update.timer)  # before anything else: it ends whatever is interrupted on the way
            try:
                with self._at_boundary() as core:  # signals wait in here
                    core.begin_update("begin_weight_update")
                    self._open = update
                options = UpdateOptions(reset_version=reset_version, partial=partial, delta=False)
                begun = self._updater.begin(manifest, options)
                if not begun:
                    self._end(dirty=None)
                return begun
            except BaseException as problem:
                if self._open is update:
                    self._abort(type(problem).__name__)
                update.timer.cancel()
                raise

    def stage(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        with self._verb("stage"):
            self._updater.stage(pairs)

    def receive(self, receiver: WeightReceiver, manifest: WeightManifest | None = None) -> None:
        """Receive tensors, as `WeightUpdater.receive` does.

        Raises `TransferTimeout` once the update's client has left or its time is up.
        """
        with self._verb("receive") as update:
            self._receiver = receiver
            try:
                self._check(update)
                self._updater.receive(receiver, manifest, check=lambda name: self._check(update))
            finally:
                self._receiver = None

    def verify(self) -> str:
        with self._verb("verify_weights"):
            return self._updater.verify()

    def commit(self, version: int, kv: Literal["keep", "recompute"]) -> str:
        """Commit, as `WeightUpdater.commit` does, then `confirm`. The update stays open if the commit is refused."""
        with self._verb("commit_weight_update") as update:
            try:
                with self._at_boundary() as core:
                    start = time.perf_counter()
                    self._updater.commit(version)
                    with self._updater.count_version():
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
        """Abort, as `WeightUpdater.abort` does, for updates begun here; any other is left alone."""
        with self._exclusive("abort_weight_update"):
            self._expired.pop(self._caller.get(), None)
            if self._open is not None:
                self._abort(self._open.failure or "Aborted")

    def _check(self, update: "_OpenUpdate") -> None:
        if update.caller in self._departed:
            raise TransferTimeout("The client that began the update has left.")
        if update.expired:
            raise TransferTimeout(update.expired)

    def _expire(self, expired: "_OpenUpdate") -> None:
        what = f"The update to version {expired.manifest.version} was not committed within {expired.timeout:g} s"
        expired.expired = f"{what} and is aborted: begin it again, with a longer timeout."
        self._roll_back(lambda update: update is expired, "TransferTimeout")

    def _roll_back(self, is_meant: "Callable[[_OpenUpdate], bool]", failure: str) -> None:
        """Abort the open update, if it is meant, once the call at work on it, which is interrupted, has returned."""
        receiver, update = self._receiver, self._open
        if receiver is not None and update is not None and is_meant(update):
            receiver.close()
        with self._call_lock:
            if self._open is not None and is_meant(self._open):
                if self._open.expired:
                    self._expired[self._open.caller] = self._open.expired
                self._abort(failure)

    def _abort(self, failure: str) -> None:
        self._updater.abort()
        self._end(dirty=None, failure=failure)

    def _require_open(self, verb: str) -> "_OpenUpdate":
        expired = self._expired.pop(self._caller.get(), None)
        if expired is not None:
            raise TransferTimeout(f"{verb}: {expired}")
        if self._open is None:
            raise LifecycleError(f"{verb}: no update is open; call begin_weight_update first.")
        return self._open

    def _end(self, *, dirty: bool | None, failure: str | None = None, num_bytes: int = 0) -> None:
        """Close the open update and count it; `failure`: why it was not completed."""
        assert self._open is not None, "only an open update ends"
        with self._at_boundary() as core:  # signals wait in here
            update, self._open = self._open, None
            update.timer.cancel()
            core.end_update(dirty=dirty)
            updates = core.stats.updates
            if failure is not None:
                updates.add_failure(failure)
            else:
                updates.add_complete(time.perf_counter() - update.start, update.stall_seconds, num_bytes)

    @contextmanager
    def _at_boundary(self) -> Iterator[Core]:
        assert self._core is not None and self._boundary is not None, "the engine has attached its core"
        with self._boundary():
            yield self._core

    @contextmanager
    def _exclusive(self, verb: str) -> Iterator[None]:
        if not self._call_lock.acquire(blocking=False):
            raise LifecycleError(f"{verb}: another call is at work on the open update; wait until it has returned.")
        try:
            yield
        finally:
            self._call_lock.release()

    @contextmanager
    def _verb(self, verb: str) -> "Iterator[_OpenUpdate]":
        """Runs one verb of the open update, and notes the class of the error it raises."""
        with self._exclusive(verb):
            update = self._require_open(verb)
            try:
                yield update
            except Exception as problem:
                update.failure = type(problem).__name__
                raise


class _OpenUpdate:
    """An update between its begin and its end. `expire` is called with it `timeout` seconds after `timer` starts."""

    def __init__(
        self, manifest: WeightManifest, caller: int | None, timeout: float, expire: "Callable[[_OpenUpdate], object]"
    ) -> None:
        self.manifest, self.caller, self.timeout = manifest, caller, timeout
        self.start, self.stall_seconds = time.perf_counter(), 0.0
        self.failure: str | None = None
        """Class of the last error that a verb raised."""
        self.expired = ""
        """Why it is aborted, once its time is up."""
        self.timer = threading.Timer(timeout, expire, [self])
        self.timer.daemon = True
