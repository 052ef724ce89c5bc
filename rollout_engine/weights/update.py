"""One whole weight update: from a source to the report, by the verbs of `WeightUpdater`.

    shadow      begin  stage ... stage  verify  (hold)  drain │ commit │ confirm
                steps go on                            end in └────────┘ between two steps
    in place    begin  drain │ stage ... stage  verify  (hold)  commit │ confirm
                             └─────────────── no steps ────────────────┘

At `hold` the replicas of a fleet wait for one another. `drain` lets requests in flight continue ("keep"), finish
first ("wait"), or ends them now ("abort").
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from rollout_engine.base.errors import DirtyWeightsError, as_weight_errors
from rollout_engine.base.messages import Staging, UpdateMode, UpdateOptions
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.model.loading.update_files import read_update
from rollout_engine.weights.transaction import WeightUpdater
from sync.base import WeightReceiver, WeightSource
from sync.errors import TransferTimeout
from sync.manifest import WeightManifest
from sync.offer import check_source
from sync.published import checked_manifest, is_store, lease_current
from sync.source import read_source
from sync.transports import make_receiver, make_sender


class StepControl(Protocol):
    """Control of an engine's steps, as far as an update of its weights needs it."""

    def boundary(self, deadline: float) -> AbstractContextManager[object]:
        """Keep steps out while inside, with none in flight. Raises, nothing done, if that is not so at `deadline`."""

    def drain(self, mode: UpdateMode, deadline: float) -> None:
        """End ("abort") or finish ("wait") requests in flight, and let no new one start before the update has ended.

        Raises `DrainTimeoutError` at `deadline` (`time.monotonic`).
        """

    def stop(self) -> None:
        """Let no step begin before the update has ended. Called inside `boundary`."""

    def commit_version(self, version: int) -> int:
        """Make `version` the live one; returns the number of requests in flight. Called inside `boundary`."""


def update_from_source(
    updater: WeightUpdater,
    source: WeightSource,
    steps: StepControl,
    options: UpdateOptions,
    version: int | None = None,
    check: Callable[[], None] = lambda: None,
    hold: Callable[[int, str], object] = lambda version, digest: None,
) -> UpdateReport:
    """Carry out one whole update from a source in this process, or raise and change nothing.

    `version=None` is a published store's own, else the live version + 1. `check`, `hold` and errors as in
    `apply_update`.
    """
    start = time.perf_counter()
    metadata = updater.metadata()
    if isinstance(source, str | os.PathLike):
        source = Path(os.path.expanduser(source))
    if isinstance(source, Path) and is_store(source):
        with as_weight_errors():
            lease = lease_current(source)
            if not options.reset_version:
                lease.require_version(updater.version)
            published = checked_manifest(lease)
        version = published.version if version is None else version
        is_as_held = all(metadata.get(spec.name, ("",))[0] == spec.dtype for spec in published.tensors)
        if version == published.version and is_as_held:
            receiver = make_receiver("store", directory=source)
            return apply_update(updater, published, receiver, steps, options, check, hold=hold)
    sender = make_sender("inproc")
    try:
        with as_weight_errors():
            pairs = read_update(source, updater.config) if isinstance(source, Path) else read_source(source)
            pairs = updater.names.used(pairs, metadata)
            check_source(pairs, metadata)
            updater.cast_notice.warn_if_cast(pairs, metadata)
            manifest = sender.offer(pairs, updater.version + 1 if version is None else version, metadata)
        receiver = make_receiver("inproc", sender=sender)
        report = apply_update(updater, manifest, receiver, steps, options, check, hold=hold)
    finally:
        sender.close()
    return msgspec.structs.replace(report, seconds=time.perf_counter() - start)


def apply_update(
    updater: WeightUpdater,
    manifest: WeightManifest,
    receiver: WeightReceiver,
    steps: StepControl,
    options: UpdateOptions,
    check: Callable[[], None] = lambda: None,
    accepted: Callable[[], object] = lambda: None,
    hold: Callable[[int, str], object] = lambda version, digest: None,
) -> UpdateReport:
    """Carry out one whole update with the tensors of `receiver`.

    `check` is called as each tensor arrives and before the commit; an exception it raises ends the update. `accepted`
    is called when the manifest is accepted, before the first tensor is asked for; `hold` with the version and the
    digest of the staged values, before any of them is live: the update continues when it returns.

    Raises the weight errors; `DirtyWeightsError` if the weights are incomplete now and were not before.
    """
    start, deadline = time.perf_counter(), time.monotonic() + options.timeout
    inplace = _in_place(updater, options.staging)
    with as_weight_errors():
        with _aborting_at_end(updater, manifest.version):
            if not updater.begin(manifest, options, inplace=inplace):
                digest = updater.digest() if options.partial else manifest.digest
                return _report_unchanged(manifest.version, digest, time.perf_counter() - start)
            stalled = 0.0
            if inplace:
                steps.drain(options.mode, deadline)
                with steps.boundary(deadline):
                    stalled = time.perf_counter()
                    steps.stop()
            accepted()
            updater.receive(receiver, check=_in_time(deadline, check))
            hold(manifest.version, updater.verify())
            if not inplace:
                steps.drain(options.mode, deadline)
            with steps.boundary(deadline):
                check()  # it may have been called off while it waited
                stalled = stalled or time.perf_counter()
                updater.commit(manifest.version)
                with updater.count_version():
                    num_in_flight = steps.commit_version(manifest.version)
                resumed = time.perf_counter()
            digest = updater.confirm()
            num_shadow_bytes = updater.num_shadow_bytes
    return UpdateReport(
        manifest.version,
        digest,
        len(manifest.tensors),
        manifest.num_bytes,
        resumed - start,
        resumed - stalled,
        num_in_flight,
        "inplace" if inplace else "shadow",
        num_shadow_bytes,
        updater.pack_seconds,
        num_bytes_sent=updater.num_bytes_received,
        changed_share=updater.changed_share,
    )


def _report_unchanged(version: int, digest: str, seconds: float) -> UpdateReport:
    """The report of an update to weights that are live already."""
    return UpdateReport(version, digest, 0, 0, seconds, 0.0, 0, changed_share=0.0)


@contextmanager
def _aborting_at_end(updater: WeightUpdater, version: int) -> Iterator[None]:
    """Leaves no update open that was not. An error that leaves complete weights incomplete says so."""
    was_dirty, was_open = updater.dirty, updater.is_open
    try:
        yield
    except Exception as problem:
        if updater.dirty and not was_dirty and not isinstance(problem, DirtyWeightsError):
            what = f"The update to version {version} in place failed: {problem}"
            raise DirtyWeightsError(f"{what} Live weights are a mixture: send them again.") from problem
        raise
    finally:
        if not was_open:
            updater.abort()


def _in_place(updater: WeightUpdater, staging: Staging) -> bool:
    """For "auto": whether there is nothing to protect, or no memory for a shadow."""
    if staging != "auto":
        return staging == "inplace"
    return updater.dirty or not updater.make_room_for_shadow()


def _in_time(deadline: float, check: Callable[[], None]) -> Callable[[str], None]:
    def check_all(name: str) -> None:
        check()
        if time.monotonic() > deadline:
            raise TransferTimeout(f"The weights did not arrive in time: '{name}' came after the deadline.")

    return check_all
