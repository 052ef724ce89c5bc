"""One replica of a fleet, as the fleet's brain sees it."""

from collections.abc import Iterable
from enum import StrEnum

_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
"""Seconds before the second try, doubled before each later one."""


class ReplicaState(StrEnum):
    """State of a replica: whether it has an engine, and may serve."""

    STARTING = "STARTING"
    """Its engine loads, or waits for its turn to."""
    STALE = "STALE"
    """It lives, but its weights are not the newest: it serves nothing until it has caught up."""
    SYNCED = "SYNCED"
    """It serves."""
    DRAINING = "DRAINING"
    """It gets no more requests, and ends when it has none."""
    DEAD = "DEAD"


class Replica:
    """One replica, as the brain sees it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = ReplicaState.STARTING
        self.policy_version = -1
        """Version of its weights; -1 before it is reported."""
        self.versions = (-1, -1)
        """That version, and the one before: the last step under it may be reported after the commit."""
        self.synced_at = 0.0
        """When it began to serve."""
        self.num_failures = 0
        """Failed starts, and deaths before it had served for a minute, in a row."""
        self.num_missed = 0
        """Failed catch-ups in a row."""
        self.problem = ""
        """Why it failed last."""

    def has(self, policy_version: int) -> None:
        """Note that it has weights of this version now."""
        if policy_version == self.policy_version:
            return
        self.versions, self.policy_version = (policy_version, self.policy_version), policy_version

    @property
    def lives(self) -> bool:
        """Whether it has an engine."""
        return self.state in (ReplicaState.STALE, ReplicaState.SYNCED, ReplicaState.DRAINING)


def backoff(num_failures: int) -> float:
    """Seconds before the next try after `num_failures` in a row: none after the first, then twice as long each."""
    return 0.0 if num_failures <= 1 else min(_FIRST_WAIT * 2.0 ** (num_failures - 2), _LONGEST_WAIT)


def problems_of(replicas: Iterable[Replica]) -> str:
    """Why none of these replicas is left."""
    found = "; ".join(f"replica {each.index}: {each.problem}" for each in replicas if each.problem)
    return f"no replica of the fleet is left ({found or 'all were scaled away'})"
