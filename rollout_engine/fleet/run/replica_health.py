"""The health of one replica of a fleet."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from rollout_engine.base.errors import RolloutEngineError
from rollout_engine.fleet.plan.replica_state import Replica
from rollout_engine.fleet.run.member import Member

_SECONDS = 5.0
"""How long a replica may take to report how many requests it has."""


class ReplicaHealth(msgspec.Struct, frozen=True, kw_only=True):
    """State of one replica of a fleet."""

    index: int
    state: str
    """STARTING, STALE (its weights are not the newest: it serves nothing), SYNCED, DRAINING or DEAD."""
    policy_version: int
    """Version of its weights; -1 before it is reported."""
    pid: int | None = None
    """Process id of its core; None if it has none."""
    node: str = ""
    """Name of the machine or cluster node that it runs on."""
    num_unfinished_requests: int = 0
    cache_usage: float = 0.0
    """KV blocks referenced by live requests / all blocks."""
    problem: str = ""
    """Why it failed last, or why it does not answer."""


def ask_health(replica: Replica, member: Member | None) -> Callable[[], ReplicaHealth]:
    """Ask a replica for its health; the function that is returned waits for the answer, some seconds at most."""
    known = ReplicaHealth(
        index=replica.index,
        state=str(replica.state),
        policy_version=replica.policy_version,
        problem=replica.problem,
    )
    if member is None:
        return lambda: known
    known = msgspec.structs.replace(known, pid=member.client.pid, node=member.replica.node)
    answers: dict[str, Future[Any]] = {}
    with suppress(RolloutEngineError):  # it is gone, and its end is about to be noted
        for name in ("get_num_unfinished_requests", "get_cache_usage"):
            answers[name.removeprefix("get_")] = member.client.call(name, {})

    def wait() -> ReplicaHealth:
        try:
            return msgspec.structs.replace(known, **{name: each.result(_SECONDS) for name, each in answers.items()})
        except (RolloutEngineError, TimeoutError) as problem:
            return msgspec.structs.replace(known, problem=str(problem) or f"no answer within {_SECONDS:g} s")

    return wait
