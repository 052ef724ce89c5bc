"""One replica of a fleet, as the fleet's brain sees it."""

from collections.abc import Iterable
from enum import StrEnum

MAX_FAILURES = 6
"""Failed starts and early deaths in a row after which a replica is given up; failed catch-ups, and it restarts."""
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


def describe_loss(replica: Replica, num_requests: int = 0, *, others_serve: bool = True) -> str:
    """Word how a fleet continues after a replica is lost or did not start, and with the requests that it had."""
    if replica.state is ReplicaState.STARTING:
        seconds = backoff(replica.num_failures)
        what = f"It is started again{f' in {seconds:g} s' if seconds else ''}"
    elif replica.num_failures >= MAX_FAILURES:
        what = f"It is given up after {replica.num_failures} failures in a row"
    else:
        what = "It was being removed"
    if not num_requests:
        return f"{what}."
    are = "request it had continues" if num_requests == 1 else f"{num_requests} requests it had continue"
    return f"{what}. The {are} {'at another replica' if others_serve else 'when a replica serves'}."
