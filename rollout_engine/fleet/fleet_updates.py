"""Weight updates of a fleet: published once, read by every replica, kept for those that start later.

publish ── every replica: stage, verify ── the same version and digest? ── every replica: commit between two steps
           steps go on                     no: all drop what is staged      who fails: missed, and has to catch up
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollout_engine.engine.client import EngineClient
from rollout_engine.errors import (
    ConfigError,
    DrainTimeoutError,
    EngineDeadError,
    LifecycleError,
    RetryableError,
    WeightUpdateError,
    as_weight_errors,
)
from rollout_engine.fleet.fleet_adapters import FleetAdapters
from rollout_engine.fleet.member import Member
from rollout_engine.fleet.store_directory import StoreDirectory
from rollout_engine.fleet.update_round import at_all, check_same, drop, held, overlaid, whole_report
from rollout_engine.messages import UpdateOptions
from rollout_engine.outputs import UpdateReport
from sync.base import WeightSource
from sync.cast_notice import CastNotice
from sync.offer import check_source
from sync.published import is_store
from sync.source import read_source
from sync.store import StoreSender

logger = logging.getLogger("rollout_engine")


class Published(NamedTuple):
    """Where the newest weights can be read."""

    path: str
    version: int
    digest: str
    """`UpdateReport.digest`: what is read there later has to be the same."""


class FleetUpdates:
    """One update at a time. The newest weights stay in shared memory."""

    def __init__(self, first_digest: str, adapters: FleetAdapters, lock: "threading.RLock") -> None:
        """`first_digest`: of the weights that the replicas start with; `lock`: the fleet's."""
        self._first_digest, self._adapters, self._lock = first_digest, adapters, lock
        self._updating = threading.Lock()
        self._cast_notice = CastNotice()
        self._directory: StoreDirectory | None = None
        self._sender: StoreSender | None = None
        self._newest: Published | None = None

    def version_of(self, member: Member) -> int:
        """Version of what a replica has started with; -1, which is no fleet's, after an update of weights or adapters.

        Raises `ConfigError` where other replicas started with other weights, and no update has replaced them.
        """
        if self._newest is not None:
            return -1
        if member.first_digest != self._first_digest:
            what = f"Replica {member.index} has loaded other weights ({member.first_digest}) than the first replica"
            advice = "leave a checkpoint as it is while a fleet serves it, and send new weights by update_weights"
            raise ConfigError(f"{what} ({self._first_digest}): {advice}.")
        return -1 if self._adapters.lags(member) else member.client.policy_version

    @property
    def has_any(self) -> bool:
        """Whether there was an update: then a checkpoint's weights are not the newest, whatever their version."""
        return self._newest is not None

    @property
    def is_updating(self) -> bool:
        """Whether an update is under way, of weights or of adapters, or the fleet scales."""
        return self._updating.locked() or self._adapters.is_changing

    @contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """Hold off other updates. Raises `LifecycleError` where one is under way."""
        if not self._updating.acquire(blocking=False):
            raise LifecycleError("update_weights: another update is under way, or the fleet scales; wait for its end.")
        try:
            yield
        finally:
            self._updating.release()

    def push(
        self,
        members: Mapping[int, Member],
        source: WeightSource,
        version: int | None,
        options: UpdateOptions,
        live_version: int,
        ended: Callable[[Mapping[int, UpdateReport], Iterable[int]], None],
    ) -> UpdateReport:
        """Have all members stage the weights, then commit them.

        `ended` is called with the reports, and with the members whose weights are in doubt: an error left them a
        mixture, or they do not say whether they have committed. It is called whatever is raised. Raises
        `LifecycleError` and `WeightUpdateError`, nothing changed, for what no replica can take, or where replicas have
        read different weights; where none commits, the error of one of them.
        """
        _check_options(options)
        if not members:
            what = "update_weights: no replica of the fleet lives at the moment"
            raise RetryableError(f"{what}; they are started again: update again a little later.")
        if options.partial:
            source = self._completed(source)
        options = msgspec.structs.replace(options, transport=None, partial=False)
        staged: dict[int, tuple[int, str]] = {}
        reports: dict[int, UpdateReport] = {}
        errors: dict[int, Exception] = {}
        with held(members, options.timeout, errors) as members:
            if not members:
                raise next(iter(errors.values()))
            path, version = self._published(next(iter(members.values())), source, version, live_version)
            try:
                at_all(members, lambda member: self._stage(member, path, version, options), staged, errors)
                check_same(path, staged)
                ready = {index: members[index] for index in staged}
                at_all(ready, lambda member: member.client.commit_weights(options.timeout), reports, errors)
            finally:  # whatever came between: what is committed is committed
                missing = {index: member for index, member in members.items() if index not in reports}
                in_doubt = drop(missing, staged, reports, errors)
                if not reports and self._sender is not None and self._is_own(path):
                    self._sender.take_back()
                with self._lock:  # whoever catches up meanwhile reads both, or neither
                    if reports:
                        self._newest = Published(path, *next(iter(staged.values())))
                    ended(reports, in_doubt)
        if not reports:
            error = next(iter(errors.values()))
            if isinstance(error, EngineDeadError):
                what = "update_weights: every replica was lost before it had committed"
                raise RetryableError(f"{what}; they are started again with the weights from before: update again.")
            raise error
        first = next(iter(reports.values()))
        for index, error in errors.items():
            logger.warning("replica %d has missed version %d: %s", index, first.version, error)
        return whole_report(reports)

    def catch_up(self, member: Member) -> int:
        """Give a replica, whose `updating` is held, the newest weights and adapters; returns the version that it has.

        Raises as `EngineClient.update_weights`, and what an adapter's commit raises.
        """
        with self._lock:
            newest, adapters = self._newest, self._adapters.state
        assert newest is not None or adapters.num_changes, "a replica lags only behind an update"
        if newest is not None:
            self._catch_up_weights(member, newest)
        if adapters.num_changes:
            self._adapters.restore(member, adapters)
        return adapters.policy_version

    def close(self) -> None:
        """Remove what is published."""
        if self._sender is not None and self._directory is not None:
            self._sender.close()
            self._directory.remove()

    def _catch_up_weights(self, member: Member, newest: Published) -> None:
        client, options = member.client, UpdateOptions(reset_version=True)
        try:
            if self._stage(member, newest.path, newest.version, options) != (newest.version, newest.digest):
                raise _changed(newest)
            client.commit_weights(options.timeout)
        except BaseException:
            client.drop_staged_weights()
            raise

    def _stage(self, member: Member, path: str, version: int | None, options: UpdateOptions) -> tuple[int, str]:
        with self._near(member, path, options.timeout) as path:
            return member.client.stage_weights(path, version, options)

    def _is_own(self, path: str) -> bool:
        return self._directory is not None and path == str(self._directory.path)

    def _completed(self, part: WeightSource) -> WeightSource:
        """All of the newest weights, those of `part` in their place: a replica that starts later needs all of them.

        Raises `WeightUpdateError` where what others hold cannot be read here.
        """
        newest = self._newest
        if isinstance(part, str | os.PathLike) or newest is None or not self._is_own(newest.path):
            what = "update_weights(partial=True): the replicas of a fleet get the rest from the update before"
            advice = "first send all weights once, as an nn.Module or as tensors, then parts, as tensors too"
            raise WeightUpdateError(f"{what}, if both have come as tensors and not as a path: {advice}.")
        with as_weight_errors():
            return overlaid(newest.path, part)

    @contextmanager
    def _near(self, member: Member, path: str, seconds: float) -> Iterator[str]:
        """Where a replica reads the weights: our publication near it, a user's path on its own node.

        Errors of a user's path say on which node it was read.
        """
        if self._is_own(path):
            yield member.replica.near(path, seconds)
            return
        try:
            yield path
        except WeightUpdateError as problem:
            raise type(problem)(f"On node {member.replica.node}: {problem}") from problem

    def _published(
        self, member: Member, source: WeightSource, version: int | None, live_version: int
    ) -> tuple[str, int | None]:
        """Where the weights can be read, and their version. A path is left where it is."""
        if isinstance(source, str | os.PathLike):
            path = os.path.abspath(os.path.expanduser(source))
            if version is None and not is_store(Path(path)):  # a store has a version of its own
                version = live_version + 1
            return path, version
        _, metadata = member.client.call("get_live_weights", {}).result()
        version = live_version + 1 if version is None else version
        with as_weight_errors():
            if self._directory is None or self._sender is None:
                self._directory = StoreDirectory()
                self._sender = StoreSender(self._directory.path, reset_version=True)
            pairs = read_source(source)
            check_source(pairs, metadata)
            self._cast_notice.warn_if_cast(pairs, metadata)
            self._sender.offer(pairs, version, metadata)
        return str(self._directory.path), version


def _check_options(options: UpdateOptions) -> None:
    """Raise `LifecycleError` for what leads to one engine alone."""
    if options.transport not in (None, "store"):
        what = f"update_weights: transport={options.transport!r} leads to one engine"
        raise LifecycleError(f"{what}; the replicas of a fleet read one store: leave transport=None.")
    if options.draft:
        what = "update_weights(draft=True): the replicas of a fleet keep the draft model that they were started with"
        raise LifecycleError(f"{what}. Use one engine, or start the fleet with another draft_model.")


@contextmanager
def drained(client: EngineClient, options: UpdateOptions) -> Iterator[UpdateOptions]:
    """Let requests end first where that is asked for: at all replicas before one of them commits.

    Raises `DrainTimeoutError`, nothing changed.
    """
    if options.mode != "wait" or client.call("is_paused", {}).result():
        yield options
        return
    pause = dict(mode="wait", clear_cache=False, wait_for_inflight_requests=None, drain_timeout=options.timeout)
    try:
        try:
            client.call("pause_generation", pause).result()
        except DrainTimeoutError:
            count = client.call("get_num_unfinished_requests", {}).result()
            what = f"update_weights: {count} requests are still in flight after {options.timeout:g} seconds"
            raise DrainTimeoutError(f"{what}; they go on under the old weights.") from None
        yield msgspec.structs.replace(options, mode="keep")
    finally:
        client.call("resume_generation", {}).result()


def _changed(published: Published) -> WeightUpdateError:
    what = f"{published.path} holds other weights than those of version {published.version} that another replica read"
    return WeightUpdateError(f"{what}: leave them there as long as the fleet serves them, or update it again.")
