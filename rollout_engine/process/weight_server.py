"""Receives weight updates in a core's process: one at a time, each on its own thread, committed between two steps.

And the adapters of a fleet of which this core is a replica.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from rollout_engine.base.errors import LifecycleError, as_weight_errors
from rollout_engine.base.lora_request import LoRAInfo, LoRARequest
from rollout_engine.base.messages import KvMode, UpdateOptions
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.engine.driver import EngineDriver
from rollout_engine.engine.staged_adapters import StagedAdapters
from rollout_engine.engine.update_steps import UpdateSteps
from rollout_engine.engine.verb_table import VerbTable
from rollout_engine.process.background import run_in_background
from rollout_engine.process.weight_rendezvous import Rendezvous
from rollout_engine.weights.update import apply_update, update_from_source
from sync.base import WeightReceiver
from sync.checkpoint_names import CheckpointNames
from sync.errors import TransferTimeout
from sync.manifest import WeightManifest

_POLL_SECONDS = 0.005

WEIGHT_VERBS = VerbTable()
"""Verbs by which a `WeightClient` updates the weights of a core in another process."""


class ServingDriver(EngineDriver):
    """An `EngineDriver` with a `WeightServer`, for a core that other processes use."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.weights = WeightServer(self)
        self.adapters = StagedAdapters(self)


@WEIGHT_VERBS.add(public=False)
def get_live_weights(
    driver: ServingDriver, draft: bool = False
) -> tuple[int, dict[str, tuple[str, tuple[int, ...]]], CheckpointNames]:
    """Version of the live weights, or of the draft model's, name -> (dtype, shape) of each, and further names."""
    updater = driver.executor.updater_for(draft=draft)
    return updater.version if draft else driver.core.policy_version, updater.metadata(), updater.names


@WEIGHT_VERBS.add(public=False)
def get_live_digest(driver: ServingDriver) -> str:
    """Digest of the live weights, which are read whole, without experts that engines divide."""
    return driver.executor.worker.shared_digest()


@WEIGHT_VERBS.add(public=False)
def begin_weight_update(
    driver: ServingDriver, manifest: WeightManifest, rendezvous: Rendezvous, options: UpdateOptions
) -> Future[bool]:
    """Open an update. True: the manifest is accepted, send the tensors. False: these weights are live already."""
    return driver.weights.begin(driver.caller, manifest, rendezvous, options)


@WEIGHT_VERBS.add(public=False)
def end_weight_update(driver: ServingDriver) -> Future[UpdateReport]:
    """Commit the weights held by `stage_weights`. Return the report of this client's last update once it is complete.

    Raises that update's error.
    """
    return driver.weights.report(driver.caller)


@WEIGHT_VERBS.add(public=False)
def abort_weight_update(driver: ServingDriver) -> None:
    """Abort this client's update, unless it has been committed."""
    driver.weights.call_off(driver.caller)


@WEIGHT_VERBS.add(public=False)
def stage_weights(
    driver: ServingDriver, path: str, version: int | None, options: UpdateOptions
) -> Future[tuple[int, str]]:
    """Stage an update from a published store or a checkpoint that this process can read; `end_weight_update` commits.

    Returns the version and the digest of the staged weights, or of equal live ones.
    """
    return driver.weights.stage(driver.caller, path, version, options)


@WEIGHT_VERBS.add(public=False, beside_steps=lambda driver, arguments: True)
def stage_lora(driver: ServingDriver, lora_request: LoRARequest, verb: str) -> LoRAInfo:
    """Read an adapter and check it, for `commit_loras`. Its `policy_version` is the live one; `verb`: the user's."""
    return driver.adapters.stage(lora_request, verb)


@WEIGHT_VERBS.add(public=False, beside_steps=lambda driver, arguments: True)
def commit_loras(
    driver: ServingDriver, loras: list[LoRAInfo], version: int, kv: KvMode, verb: str
) -> tuple[float, int]:
    """Have these adapters and no others as a policy version. Returns seconds without steps, and requests in flight."""
    return driver.adapters.commit(loras, version, kv, verb)


@WEIGHT_VERBS.add(public=False)
def drop_loras(driver: ServingDriver) -> None:
    """Forget the adapters that this client has staged."""
    driver.adapters.leave(driver.caller)


class WeightServer:
    """Receives the updates of all clients. Its methods are called between two steps."""

    def __init__(self, driver: EngineDriver) -> None:
        self._driver = driver
        self._last: dict[int, _Update] = {}
        """Last update of each client."""
        self._receiver: tuple[Rendezvous, WeightReceiver] | None = None
        """The last update's receiver, kept so that the next one need not map its memory or join its group again."""

    def begin(
        self, client_index: int, manifest: WeightManifest, rendezvous: Rendezvous, options: UpdateOptions
    ) -> Future[bool]:
        """Open an update. True: its manifest is accepted, and its tensors are awaited. False: these weights are live.

        Raises `LifecycleError` if an update is open, or the weights are released.
        """

        updater = self._driver.executor.updater_for(draft=options.draft)

        def apply(update: _Update, steps: UpdateSteps) -> UpdateReport:
            with as_weight_errors():
                receiver = self._connect_receiver(rendezvous)
            try:
                update.attach(receiver)
                accepted = partial(update.ready.set_result, True)
                return apply_update(updater, manifest, receiver, steps, options, update.raise_if_called_off, accepted)
            except BaseException:
                self._receiver = None
                receiver.close()
                raise

        return self._start(client_index, options, apply, is_live=lambda report: False).ready

    def stage(
        self, client_index: int, path: str, version: int | None, options: UpdateOptions
    ) -> Future[tuple[int, str]]:
        """Stage an update from a path that this process can read, and hold it until `report` is called."""

        updater = self._driver.executor.updater_for(draft=options.draft)

        def apply(update: _Update, steps: UpdateSteps) -> UpdateReport:
            hold = partial(update.hold, time.monotonic() + options.timeout)
            return update_from_source(updater, path, steps, options, version, update.raise_if_called_off, hold)

        return self._start(client_index, options, apply, is_live=lambda report: (report.version, report.digest)).ready

    def report(self, client_index: int) -> Future[UpdateReport]:
        """Let this client's last update continue, and return its report. Raises `LifecycleError` if there was none."""
        if client_index not in self._last:
            raise LifecycleError("end_weight_update: this client has begun no update.")
        return self._last[client_index].go_on()

    def call_off(self, client_index: int) -> None:
        """Abort this client's update, unless it has been committed."""
        if client_index in self._last:
            self._last[client_index].call_off()

    def leave(self, client_index: int) -> None:
        """Abort the update of a client that has left, and forget the client."""
        self.call_off(client_index)
        self._last.pop(client_index, None)

    def _start(
        self,
        client_index: int,
        options: UpdateOptions,
        apply: "Callable[[_Update, UpdateSteps], UpdateReport]",
        *,
        is_live: Callable[[UpdateReport], Any],
    ) -> "_Update":
        last = self._last.get(client_index)
        if last is not None and last.report.done():
            del self._last[client_index]  # if this one is refused, its end must not return that one's report
        UpdateOptions.from_values(**msgspec.structs.asdict(options))
        update = _Update(is_live)
        steps = UpdateSteps(self._driver, options, lambda: time.sleep(_POLL_SECONDS), update.raise_if_called_off)
        steps.begin()
        try:
            run_in_background(update.run, partial(steps.run, partial(apply, update, steps)), name="weight-update")
        except BaseException:  # no thread
            steps.end()
            raise
        self._last[client_index] = update
        return update

    def _connect_receiver(self, rendezvous: Rendezvous) -> WeightReceiver:
        if self._receiver is None or self._receiver[0] != rendezvous:
            if self._receiver is not None:
                self._receiver[1].close()
            self._receiver = rendezvous, rendezvous.make_receiver()
        return self._receiver[1]


class _Update:
    """One update, which runs on its own thread."""

    def __init__(self, is_live: Callable[[UpdateReport], Any]) -> None:
        self.ready: Future[Any] = Future()
        """Whether the manifest is accepted, or (version, digest) of the staged weights: the client's turn."""
        self.report: Future[UpdateReport] = Future()
        self._is_live = is_live
        """The result of `ready` for weights that were live already."""
        self._may_go_on, self._called_off = threading.Event(), threading.Event()
        self._receiver: WeightReceiver | None = None

    def attach(self, receiver: WeightReceiver) -> None:
        """Let `call_off` close this receiver, which ends a wait in it. Raises as `raise_if_called_off`."""
        self._receiver = receiver
        self.raise_if_called_off()

    def raise_if_called_off(self) -> None:
        """Raise `TransferTimeout` if the update was called off."""
        if self._called_off.is_set():
            raise TransferTimeout("The client left, or gave up, before the update was complete.")

    def hold(self, deadline: float, version: int, digest: str) -> None:
        """Report it as staged, and wait until it may commit. Raises as `raise_if_called_off`, or at `deadline`."""
        self.ready.set_result((version, digest))
        if not self._may_go_on.wait(deadline - time.monotonic()):
            raise TransferTimeout(f"Version {version} was staged, and its commit did not come in time.")
        self.raise_if_called_off()

    def go_on(self) -> Future[UpdateReport]:
        """Let it commit. Any thread may call it."""
        self._may_go_on.set()
        return self.report

    def call_off(self) -> None:
        """Abort the update, unless it has been committed. Any thread may call it."""
        self._called_off.set()
        self._may_go_on.set()
        if self._receiver is not None and not self.report.done():
            self._receiver.close()

    def run(self, update: Callable[[], UpdateReport]) -> None:
        """Call `update` and resolve both futures."""
        try:
            report = update()
        except BaseException as problem:  # this thread's last
            self.report.set_exception(problem)
            if not self.ready.done():
                self.ready.set_exception(problem)
        else:
            self.report.set_result(report)
            if not self.ready.done():
                self.ready.set_result(self._is_live(report))
