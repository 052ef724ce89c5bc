"""Faults in a fleet's decisions that it once had, or was found open to: for the tier without threads."""

from collections.abc import Mapping
from typing import Any

from pytest import MonkeyPatch

from rollout_engine.base.messages import EngineCoreOutputs
from rollout_engine.fleet.plan.balancer import Balancer
from rollout_engine.fleet.plan.brain import Brain
from rollout_engine.fleet.plan.ledger import Ledger
from rollout_engine.fleet.plan.strategies import Homes
from rollout_engine.fleet.run.client import FleetClient
from rollout_engine.fleet.run.member import Member
from tests.simulation import brain_fleet
from tests.simulation.known_faults import Put

FAULTS: dict[str, Put] = {}
"""What a fleet did wrong -> puts it back."""


def fault(what: str) -> Any:
    """Add a fault to `FAULTS`."""
    return lambda put: FAULTS.setdefault(what, put)


@fault("the ends of sequences that were moved are told twice")
def _moved_ends_twice(patch: MonkeyPatch) -> None:
    drop_foreign = Ledger._drop_foreign

    def keep_ends(book: Ledger, replica: int, outputs: EngineCoreOutputs) -> None:
        ended = outputs.ended
        drop_foreign(book, replica, outputs)
        outputs.ended = ended

    patch.setattr(Ledger, "_drop_foreign", keep_ends)


@fault("a replica that is given up or started anew is still not heard about sequences that were taken from it")
def _never_heard_again(patch: MonkeyPatch) -> None:
    restart, end = Brain._restart, Brain._end

    def keeping(original: Any) -> Any:
        def keep(brain: Brain, replica: Any, *rest: Any) -> Any:
            foreign = brain.ledger._foreign.get(replica.index)
            actions = original(brain, replica, *rest)
            if foreign:
                brain.ledger._foreign[replica.index] = foreign
            return actions

        return keep

    patch.setattr(Brain, "_restart", keeping(restart))
    patch.setattr(Brain, "_end", keeping(end))


@fault("sessions stay at a home that does not serve")
def _old_home(patch: MonkeyPatch) -> None:
    patch.setattr(Homes, "find", lambda homes, key: homes._replica_of.get(key))


@fault("a session leaves a home that serves")
def _no_home(patch: MonkeyPatch) -> None:
    decide = Balancer._decide
    patch.setattr(
        Balancer, "_decide", lambda balancer, prefix, session, excluding: decide(balancer, prefix, None, excluding)
    )


@fault("a commit whose answer came late is not counted")
def _late_commit(patch: MonkeyPatch) -> None:
    drop = brain_fleet.drop

    def forget(members: Any, staged: Any, reports: Mapping[int, Any], errors: Mapping[int, Exception]) -> list[int]:
        return drop(members, staged, dict(reports), dict(errors))

    patch.setattr(brain_fleet, "drop", forget)


@fault("the load of a request that moves is not given back")
def _load_stays(patch: MonkeyPatch) -> None:
    moved = Brain._move_requests

    def keep(brain: Brain, replica: Any) -> Any:
        with MonkeyPatch.context() as inner:
            inner.setattr(brain.balancer, "ended", lambda *_: None)
            return moved(brain, replica)

    patch.setattr(Brain, "_move_requests", keep)


@fault("what a core says after its end was noticed counts")
def _former_outputs(patch: MonkeyPatch) -> None:
    received = FleetClient.deliver_outputs

    def as_present(client: FleetClient, member: Member, outputs: EngineCoreOutputs) -> None:
        if member.index in client._members:
            received(client, client._members[member.index], outputs)

    patch.setattr(FleetClient, "deliver_outputs", as_present)


@fault("a caught-up notice of a replica that was started anew counts for the new one")
def _former_caught_up(patch: MonkeyPatch) -> None:
    def caught_up(client: FleetClient, member: Member, version: int) -> None:
        with client._lock:
            if member.index in client._members:
                client._dispatcher.do(client._brain.has_weights(member.index, version, 0.0))

    patch.setattr(FleetClient, "caught_up", caught_up)
