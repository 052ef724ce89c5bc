"""One whole weight update: from tensors on their way to the report, over `WeightUpdater`'s transaction.

    shadow      begin  stage ... stage  verify   settle │ commit │ confirm
                steps go on                     end in  └────────┘ between two steps
    in place    begin  settle │ stage ... stage  verify  commit │ confirm
                              └─────────── no steps ────────────┘

`settle` is what becomes of requests in flight: nothing ("keep"), finish first ("wait"), or end now ("abort").
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from rollout_engine.errors import DirtyWeightsError, as_weight_errors
from rollout_engine.execution.weights import WeightUpdater
from rollout_engine.messages import Staging, UpdateMode, UpdateOptions
from rollout_engine.outputs import UpdateReport
from sync.base import Metadata, WeightReceiver, WeightSource
from sync.errors import TransferTimeout
from sync.manifest import WeightManifest
from sync.published import checked_manifest, is_store, lease_current
from sync.source import read_source
from sync.transports import make_receiver, make_sender


class StepSide(Protocol):
    """What an update asks of whoever runs the steps."""

    def boundary(self) -> AbstractContextManager[object]:
        """Keeps steps out."""

    def settle(self, mode: UpdateMode, deadline: float) -> None:
        """End ("abort") or finish ("wait") what is in flight, and let nothing new in before the update has ended.

        Raises `DrainTimeoutError` at `deadline` (`time.monotonic`).
        """

    def stop(self) -> None:
        """No step before the update has ended. Called inside `boundary`."""

    def advance(self, version: int) -> int:
        """The weights are now `version`'s; returns the number of requests in flight. Called inside `boundary`."""


def update_from_source(
    updater: WeightUpdater,
    source: WeightSource,
    steps: StepSide,
    options: UpdateOptions,
    version: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> UpdateReport:
    """One whole update from a source in this process, or an error and nothing changed.

    `version=None` is a published store's own, else the live version + 1. `check` and errors as in `apply_update`.
    """
    start = time.perf_counter()
    if isinstance(source, str | os.PathLike):
        source = Path(os.path.expanduser(source))
    if isinstance(source, Path) and is_store(source):
        published = _published(source)
        version = published.version if version is None else version
        if version == published.version and _fits(published, updater.metadata()):
            return apply_update(updater, published, make_receiver("store", directory=source), steps, options, check)
    sender = make_sender("inproc")
    try:
        with as_weight_errors():
            pairs, metadata = read_source(source), updater.metadata()
            updater.cast_notice.look(pairs, metadata)
            manifest = sender.offer(pairs, updater.version + 1 if version is None else version, metadata)
        report = apply_update(updater, manifest, make_receiver("inproc", sender=sender), steps, options, check)
    finally:
        sender.close()
    return msgspec.structs.replace(report, seconds=time.perf_counter() - start)


def apply_update(
    updater: WeightUpdater,
    manifest: WeightManifest,
    receiver: WeightReceiver,
    steps: StepSide,
    options: UpdateOptions,
    check: Callable[[], None] = lambda: None,
) -> UpdateReport:
    """One whole update that `receiver` brings, which is asked for nothing before the manifest is accepted.

    `check` is called as each tensor comes, and before the commit: what it raises ends the update.

    Raises the weight errors; `DirtyWeightsError` where that leaves weights incomplete which were not before.
    """
    start, deadline = time.perf_counter(), time.monotonic() + options.timeout
    inplace = _in_place(updater, options.staging)
    with as_weight_errors():
        begun = updater.begin(
            manifest,
            reset_version=options.reset_version,
            inplace=inplace,
            allow_nonfinite=options.allow_nonfinite,
            partial=options.partial,
        )
        if not begun:
            digest = updater.digest() if options.partial else manifest.digest
            return UpdateReport(manifest.version, digest, 0, 0, time.perf_counter() - start, 0.0, 0)
        with _ended(updater, manifest.version):
            stalled = 0.0
            if inplace:
                steps.settle(options.mode, deadline)
                with steps.boundary():
                    stalled = time.perf_counter()
                    steps.stop()
            updater.receive(receiver, check=_in_time(deadline, check))
            updater.verify()
            if not inplace:
                steps.settle(options.mode, deadline)
            check()
            with steps.boundary():
                stalled = stalled or time.perf_counter()
                updater.commit(manifest.version)
                num_in_flight = steps.advance(manifest.version)
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
    )


@contextmanager
def _ended(updater: WeightUpdater, version: int) -> Iterator[None]:
    """Afterwards no update is open. An error that leaves a mixture where there was none says so."""
    was_dirty = updater.dirty
    try:
        yield
    except Exception as problem:
        if updater.dirty and not was_dirty and not isinstance(problem, DirtyWeightsError):
            what = f"The update to version {version} in place failed: {problem}"
            raise DirtyWeightsError(f"{what} Live weights are a mixture: send them again.") from problem
        raise
    finally:
        updater.abort()


def _published(store: Path) -> WeightManifest:
    with as_weight_errors():
        return checked_manifest(lease_current(store))


def _fits(manifest: WeightManifest, metadata: Metadata) -> bool:
    """Whether nothing has to be cast."""
    return all(spec.name not in metadata or spec.dtype == metadata[spec.name][0] for spec in manifest.tensors)


def _in_place(updater: WeightUpdater, staging: Staging) -> bool:
    """ "auto": with a shadow, unless there is nothing to protect or no room for one."""
    if staging != "auto":
        return staging == "inplace"
    return updater.dirty or updater.num_bytes_to_shadow() > updater.room_for_shadow


def _in_time(deadline: float, check: Callable[[], None]) -> Callable[[str], None]:
    def check_all(name: str) -> None:
        check()
        if time.monotonic() > deadline:
            raise TransferTimeout(f"The weights did not arrive in time: '{name}' came after the deadline.")

    return check_all
