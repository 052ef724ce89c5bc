"""Carries out the decisions of a fleet's brain. The fleet's client calls it, inside its lock."""

from collections.abc import Iterable, MutableMapping

from rollout_engine.base.errors import EngineDeadError, RetryableError, RolloutEngineError
from rollout_engine.base.messages import EngineCoreOutputs
from rollout_engine.engine.client import Listener
from rollout_engine.fleet.plan.actions import Abort, Action, CatchUp, Fail, Send, Start, Stop, Tell
from rollout_engine.fleet.plan.brain import Brain
from rollout_engine.fleet.run.member import Member
from rollout_engine.fleet.run.supervisor import Fleet, Supervisor


class Dispatcher:
    """Sends requests to replicas, has them started, updated and ended, and notifies the user. No-op after shutdown."""

    def __init__(
        self, fleet: Fleet, brain: Brain, members: MutableMapping[int, Member], supervisor: Supervisor
    ) -> None:
        """`members`: the replicas that have an engine; those that are stopped are removed from it."""
        self._fleet, self._brain, self._members, self._supervisor = fleet, brain, members, supervisor
        self.listener: Listener | None = None
        """The user's listener."""
        self.dead_error: EngineDeadError | None = None
        """Why nothing can be computed any more; None while something can."""

    def do(self, actions: Iterable[Action], *, raises: bool = False) -> None:
        """Carry out these decisions. `raises`: the sender of a request is the caller."""
        refused = []
        for action in [] if self._supervisor.is_closed else actions:
            match action:
                case Send(index, request):
                    error = self._members[index].send(request)
                    if error is not None:
                        refused.append((index, request.first_sequence_id, error))
                case Abort(index, sequence_ids):
                    self._members[index].abort(sequence_ids)
                case Tell(ended):
                    self.deliver(EngineCoreOutputs(self._brain.policy_version, ended=ended))
                case Start(index, at):
                    self._supervisor.start(index, at, self._fleet)
                case CatchUp(index, at):
                    self._supervisor.catch_up(self._members[index], at, self._fleet)
                case Stop(index, answers_first):
                    self._supervisor.retire(self._members.pop(index), answers_first=answers_first)
                case Fail(reason):
                    self.fail_all(EngineDeadError(f"The fleet is dead: {reason}."))
        for (
            index,
            sequence_id,
            error,
        ) in refused:  # now that the other samples of a request are sent, and can be aborted
            self.refuse(index, sequence_id, error, raises=raises)

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        """Deliver outputs to the user."""
        if self.listener is not None:
            self.listener.deliver(outputs)

    def refuse(self, replica: int, sequence_id: int, error: RolloutEngineError, *, raises: bool = False) -> None:
        """Try others with a request that a replica could not take just now; report one that none takes to the user."""
        others_may = isinstance(error, RetryableError)
        first, actions = self._brain.note_refusal(sequence_id, replica, others_may=others_may)
        self.do(actions, raises=raises)
        if first is not None and raises:
            raise error
        if first is not None and self.listener is not None:
            self.listener.refuse(first, error)

    def fail_all(self, error: EngineDeadError) -> None:
        """Report to the user that every request has failed."""
        self.dead_error = error
        if self.listener is not None:
            self.listener.fail_all(error)
