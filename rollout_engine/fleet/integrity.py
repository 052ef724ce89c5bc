"""What is always so of the requests and replicas of a fleet, between two events."""

from collections.abc import Iterable, Sequence

from rollout_engine.fleet.ledger import Entry, Ledger
from rollout_engine.fleet.replica_state import Replica, ReplicaState


def check_fleet(ledger: Ledger, waiting: Sequence[Entry], replicas: Sequence[Replica], policy_version: int) -> None:
    """AssertionError where requests or replicas are not as they must be, in a fleet that has not failed."""
    ledger.check_integrity()
    if any(replica.state is not ReplicaState.DEAD for replica in replicas):
        check_requests(ledger, waiting, replicas)
        check_replicas(ledger, replicas, policy_version)


def check_requests(ledger: Ledger, waiting: Sequence[Entry], replicas: Sequence[Replica]) -> None:
    """AssertionError where a request is nowhere, or at a replica that must not have it."""
    assert len(set(waiting)) == len(waiting), "a request waits twice"
    for entry in ledger.entries():
        assert (entry in waiting) == (entry.replica is None), f"request {entry.request.first_sequence_id} is lost"
        if entry.replica is not None:
            state = replicas[entry.replica].state
            assert state in (ReplicaState.SYNCED, ReplicaState.DRAINING), f"a {state} replica has a request"
    serves = any(replica.state is ReplicaState.SYNCED for replica in replicas)
    assert not (waiting and serves), "requests wait while a replica serves"


def check_replicas(ledger: Ledger, replicas: Iterable[Replica], policy_version: int) -> None:
    """AssertionError where a replica serves other weights than the fleet's, or waits for the end of no request."""
    for replica in replicas:
        if replica.state is ReplicaState.SYNCED:
            assert replica.policy_version == policy_version, f"replica {replica.index} serves stale weights"
        elif replica.state is ReplicaState.DRAINING:
            assert ledger.of_replica(replica.index), f"replica {replica.index} drains without a request"
