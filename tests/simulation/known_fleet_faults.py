"""Faults that a fleet once had, or was found open to: each puts the faulty behaviour back."""

from typing import Any

from pytest import MonkeyPatch

from rollout_engine.base.errors import RetryableError
from rollout_engine.base.messages import EngineCoreOutputs
from rollout_engine.fleet.plan import ledger
from rollout_engine.fleet.plan.brain import Brain
from rollout_engine.fleet.plan.ledger import Entry, Ledger
from rollout_engine.fleet.plan.replica_state import ReplicaState
from rollout_engine.fleet.run import together
from rollout_engine.fleet.run.member import Member
from rollout_engine.fleet.run.supervisor import Supervisor
from tests.simulation.known_faults import Put

FAULTS: dict[str, Put] = {}
"""What a fleet did wrong -> puts it back."""


def fault(what: str) -> Any:
    """Add a fault to `FAULTS`."""
    return lambda put: FAULTS.setdefault(what, put)


@fault("a call that one replica ran is told as one that never will")
def _late_is_never(patch: MonkeyPatch) -> None:
    patch.setattr(together, "_future", together.CallFuture)


@fault("a sequence id that is given twice to abort ends twice")
def _ends_twice(patch: MonkeyPatch) -> None:
    aborted = Ledger.record_abort

    def twice(book: Ledger, sequence_ids: Any) -> Any:
        found = aborted(book, sequence_ids)
        return {replica: [*ids, *ids] if replica is None else ids for replica, ids in found.items()}

    patch.setattr(Ledger, "record_abort", twice)


@fault("a replica for which no thread can start is ended inside the lock that its own thread waits for")
def _ends_inside_lock(patch: MonkeyPatch) -> None:
    def end(supervisor: Supervisor, member: Member) -> None:
        try:
            supervisor._spawn(f"end-replica-{member.index}", member.replica.end)
        except RetryableError:
            member.replica.end()

    patch.setattr(Supervisor, "_end", end)


@fault("requests wait for ever once the last replica has been scaled away")
def _nobody_fails(patch: MonkeyPatch) -> None:
    def end(brain: Brain, replica: Any) -> list[Any]:
        replica.state = ReplicaState.DEAD
        return []

    patch.setattr(Brain, "_end", end)


@fault("what a replica still says of requests that were taken from it counts")
def _foreign_counts(patch: MonkeyPatch) -> None:
    patch.setattr(Ledger, "_drop_foreign", lambda book, replica, outputs: None)


@fault("the last tokens of a lost replica are computed again")
def _tokens_forgotten(patch: MonkeyPatch) -> None:
    received = Ledger.record_outputs

    def forget(book: Ledger, replica: int, outputs: EngineCoreOutputs) -> list[Entry]:
        ended = received(book, replica, outputs)
        if book._pending and len(outputs.sequence_ids) > 1:
            book._pending.pop()
        return ended

    patch.setattr(Ledger, "record_outputs", forget)


@fault("the samples of a lost replica go on with each other's seeds")
def _wrong_seed(patch: MonkeyPatch) -> None:
    patch.setattr(ledger, "child_seed", lambda seed, index: seed)


@fault("a replica that has missed a commit serves on")
def _stale_serves(patch: MonkeyPatch) -> None:
    patch.setattr(Brain, "_missed_commit", lambda brain, replica, now: [])


@fault("a replica that starts later serves with the weights of its checkpoint")
def _checkpoint_serves(patch: MonkeyPatch) -> None:
    started = Brain.note_start

    def as_newest(brain: Brain, replica: int, policy_version: int, now: float) -> list[Any]:
        return started(brain, replica, brain.policy_version, now)

    patch.setattr(Brain, "note_start", as_newest)


@fault("a fleet does not hear that a core is about to end")
def _drains_unheard(patch: MonkeyPatch) -> None:
    def join(member: Member, owner: Any) -> None:
        member._owner = owner
        member.client.listen(member)

    patch.setattr(Member, "join", join)


@fault("a replica that has failed once does not come back")
def _never_again(patch: MonkeyPatch) -> None:
    patch.setattr(Supervisor, "start", lambda supervisor, index, at, fleet: None)
