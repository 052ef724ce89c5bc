"""Metrics of a fleet: those that each replica has reported last, and their sums.

A replica whose engine is lost starts again at zero. The counts of its earlier engines are added to its counts
now, so that no counter of a replica, or of the fleet, goes back.
"""

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from rollout_engine.base.errors import RolloutEngineError
from rollout_engine.base.metrics import CoreMetrics, CoreStats, ReplicaMetrics
from rollout_engine.base.version_pin import standing_of
from rollout_engine.engine import combine
from rollout_engine.fleet.plan.brain import Brain
from rollout_engine.fleet.run.member import Member

ANSWER_SECONDS = 4.0
"""How long all replicas together may take to answer: Prometheus gives a scrape up after 10 s."""


class FleetMetrics:
    """Reads the metrics of a fleet, whose lock guards `brain` and `members`. Any thread may call it."""

    def __init__(self, brain: Brain, members: Mapping[int, Member], lock: "threading.RLock") -> None:
        self._brain, self._members, self._lock = brain, members, lock
        self._counts: dict[int, _Counts] = {}

    def read(self, seconds: float | None = None) -> tuple[CoreMetrics, dict[int, ReplicaMetrics]]:
        """The sum of all replicas, and each one by its index.

        Waits `seconds` and `ANSWER_SECONDS` at most. A replica that has no engine at the moment, is lost meanwhile or
        does not answer in time is shown with its last reported metrics, and raises nothing.
        """
        deadline = time.monotonic() + min(ANSWER_SECONDS if seconds is None else seconds, ANSWER_SECONDS)
        asked: dict[int, tuple[Member, Future[Any]]] = {}
        with self._lock:
            for index, member in self._members.items():
                with suppress(RolloutEngineError):  # it is gone, and its end is about to be noted
                    asked[index] = member, member.client.call("get_core_metrics", {})
        answers: dict[int, tuple[Member, CoreMetrics]] = {}
        for index, (member, answer) in asked.items():
            with suppress(RolloutEngineError, TimeoutError):
                answers[index] = member, answer.result(max(deadline - time.monotonic(), 0.0))
            answer.cancel()  # if it is late, no caller waits for it any more
        with self._lock:
            for index, told in answers.items():
                self._counts.setdefault(index, _Counts()).note(*told)
            return self._gather(answers)

    def _gather(self, answered: Iterable[int]) -> tuple[CoreMetrics, dict[int, ReplicaMetrics]]:
        in_flight, answered = self._brain.balancer.stats, set(answered)
        found, living = {}, []
        for index, replica in self._brain.replicas.items():
            counts, member = self._counts.get(index, _Counts()), self._members.get(index)
            core = counts.told if counts.told is not None and member is counts.member else _idle(str(replica.state))
            core = msgspec.structs.replace(core, policy_version=replica.policy_version, counters=counts.total)
            found[index] = ReplicaMetrics(
                state=str(replica.state),
                has_answered=member is not None and index in answered,
                num_requests=in_flight.num_requests.get(index, 0),
                num_kv_tokens=in_flight.num_kv_tokens.get(index, 0),
                core=core,
            )
            if member is not None and member is counts.member:
                living.append(core)
        return self._sum(living, found), found

    def _sum(self, living: list[CoreMetrics], replicas: Mapping[int, ReplicaMetrics]) -> CoreMetrics:
        """Loads of the replicas that have an engine, and of requests that wait for one; counters of all."""
        total = combine.metrics(living) if living else _idle("STARTING")
        waiting, live = self._brain.ledger.of_replica(None), self._brain.policy_version
        early = [entry for entry in waiting if standing_of(entry.request.params, live) == "early"]
        return msgspec.structs.replace(
            total,
            num_requests=total.num_requests + len(waiting),
            num_waiting=total.num_waiting + sum(len(entry.live) for entry in waiting),
            num_awaiting_version=total.num_awaiting_version + sum(len(entry.live) for entry in early),
            policy_version=total.policy_version if living else self._brain.policy_version,
            counters=combine.counters([each.core.counters for each in replicas.values()]),
        )


class _Counts:
    """Last metrics of a replica, and the sums of the engines that it had before."""

    def __init__(self) -> None:
        self.member: Member | None = None
        self.told: CoreMetrics | None = None
        self._past = CoreStats()

    @property
    def total(self) -> CoreStats:
        """Counters of all engines that the replica has had."""
        return self._past if self.told is None else combine.counters([self._past, self.told.counters])

    def note(self, member: Member, told: CoreMetrics) -> None:
        """Take the metrics of its engine. Of the same engine, those of an earlier moment are left out."""
        if member is not self.member:
            self.member, self._past = member, self.total
        elif self.told is not None and told.counters.num_steps < self.told.counters.num_steps:
            return
        self.told = told


def _idle(state: str) -> CoreMetrics:
    """The metrics of no engine."""
    return CoreMetrics(
        num_requests=0,
        num_running=0,
        num_waiting=0,
        cache_usage=0.0,
        policy_version=-1,
        state=state,
        counters=CoreStats(),
    )
