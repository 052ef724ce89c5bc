"""Weight updates of a fleet: published once, read by every replica, kept for those that start later.

publish ── every replica: stage, verify ── the same version and digest? ── every replica: commit between two steps
           steps continue                  no: all drop the staged ones     one that fails has to catch up
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from rollout_engine.base.errors import (
    ConfigError,
    DrainTimeoutError,
    EngineDeadError,
    LifecycleError,
)
from rollout_engine.base.messages import UpdateOptions
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.engine.client import EngineClient
from rollout_engine.fleet.run.adapters import FleetAdapters
from rollout_engine.fleet.run.member import Member
from rollout_engine.fleet.run.publication import Publication, Published
from rollout_engine.fleet.run.update_round import begin_round, check_same, drop, whole_report
from sync.base import WeightSource

logger = logging.getLogger("rollout_engine")


class FleetUpdates:
    """One update at a time. The newest weights stay in shared memory."""

    def __init__(self, first_digest: str, adapters: FleetAdapters, lock: "threading.RLock") -> None:
        """`first_digest`: that of the weights that the replicas start with; `lock`: the fleet's."""
        self._first_digest, self._adapters, self._lock = first_digest, adapters, lock
        self._updating = threading.Lock()
        self.policy, self.draft = Publication(), Publication(draft=True)
        """The newest weights of both models."""

    def version_of(self, member: Member) -> int:
        """Version of the weights a replica has started with; -1, no fleet's, after an update of weights or of adapters.

        Raises `ConfigError` if other replicas started with other weights, and no update has replaced them.
        """
        if self.has_any:
            return -1
        if member.first_digest != self._first_digest:
            what = f"Replica {member.index} has loaded other weights ({member.first_digest}) than the first replica"
            advice = "leave a checkpoint as it is while a fleet serves it, and send new weights by update_weights"
            raise ConfigError(f"{what} ({self._first_digest}): {advice}.")
        return -1 if self._adapters.lags(member) else member.client.policy_version

    @property
    def has_any(self) -> bool:
        """Whether the policy had an update: then a checkpoint's weights are not the newest, whatever their version."""
        return self.policy.newest is not None

    @property
    def is_updating(self) -> bool:
        """Whether an update is under way, of weights or of adapters, or the fleet scales."""
        return self._updating.locked() or self._adapters.is_changing

    @contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """Hold off other updates. Raises `LifecycleError` if one is under way."""
        if not self._updating.acquire(blocking=False):
            raise LifecycleError("update_weights: another update is under way, or the fleet scales; wait for its end.")
        try:
            yield
        finally:
            self._updating.release()

    def push_to_replicas(
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
        mixture, or they do not report whether they have committed. It is called whatever is raised. Raises
        `LifecycleError` and `WeightUpdateError`, nothing changed, for weights that no replica takes, or if replicas
        have read different weights; if none commits, the error of one of them.
        """
        _check_options(options)
        publication = self.draft if options.draft else self.policy
        is_part, options = options.partial, msgspec.structs.replace(options, transport=None, partial=False)
        with begin_round("update_weights", members, options.timeout) as change:
            reports: dict[int, UpdateReport] = change.committed
            first_member = next(iter(change.members.values()))
            if is_part:
                source = publication.complete_source(first_member, source)
            live = publication.live_version(first_member) if options.draft else live_version
            path, version = publication.publish(first_member, source, version, live)
            try:
                change.stage(lambda member: publication.stage(member, path, version, options))
                check_same(path, change.staged)
                change.commit(change.staged, lambda member: member.client.commit_weights(options.timeout))
            finally:  # whatever happened before: committed weights stay so
                missing = {index: member for index, member in change.members.items() if index not in reports}
                in_doubt = drop(missing, change.staged, reports, change.errors)
                if not reports:
                    publication.take_back(path)
                with self._lock:  # a replica that catches up meanwhile reads both, or neither
                    if reports:
                        publication.newest = Published(path, *next(iter(change.staged.values())))
                    ended(reports, in_doubt)
        if not reports:
            raise change.failure("weights")
        change.log_missed(f"version {next(iter(reports.values())).version}")
        return whole_report(reports)

    def catch_up(self, member: Member) -> int:
        """Give a replica, whose `updating` is held, the newest weights and adapters; returns the version that it has.

        Raises as `EngineClient.update_weights`, and any error of an adapter's commit.
        """
        with self._lock:
            newest, adapters = self.policy.newest, self._adapters.state
        assert newest is not None or adapters.num_changes, "a replica lags only behind an update"
        if newest is not None:
            self.policy.give(member, newest)
        if adapters.num_changes:
            self._adapters.restore(member, adapters)
        return adapters.policy_version

    def lacks_draft(self, member: Member) -> bool:
        """Whether a replica drafts by older weights of the draft model than others do."""
        newest = self.draft.newest
        return newest is not None and member.draft_digest != newest.digest

    def give_draft(self, member: Member) -> None:
        """Give a replica the draft model's newest weights, while it serves. A failure is logged: it is only slower."""
        with member.updating:
            newest = self.draft.newest
            if newest is None or not self.lacks_draft(member):
                return
            try:
                self.draft.give(member, newest)
            except EngineDeadError:
                return  # it is restarted, and is given them then
            except Exception as problem:
                what = "replica %d has missed version %d of the draft model, and drafts by older weights until the next"
                logger.warning(f"{what}: %s", member.index, newest.version, problem)
            else:
                member.draft_digest = newest.digest

    def close(self) -> None:
        """Remove the published weights."""
        self.policy.close()
        self.draft.close()


def _check_options(options: UpdateOptions) -> None:
    """Raise `LifecycleError` for options that lead to one engine alone."""
    if options.transport not in (None, "store"):
        what = f"update_weights: transport={options.transport!r} leads to one engine"
        raise LifecycleError(f"{what}; the replicas of a fleet read one store: leave transport=None.")


@contextmanager
def drain_requests(client: EngineClient, options: UpdateOptions) -> Iterator[UpdateOptions]:
    """Let requests end first if that is asked for: at all replicas before one of them commits.

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
