"""Calls of verbs over a fleet: on every replica as one call, on each separately, or on one of them."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rollout_engine.base.errors import LifecycleError, RequestError, RetryableError
from rollout_engine.engine.calls import CallFuture
from rollout_engine.engine.verb import Verb
from rollout_engine.engine.verbs import VERBS
from rollout_engine.fleet.plan.balancer import BalancerStats
from rollout_engine.fleet.plan.brain import Brain
from rollout_engine.fleet.plan.replica_state import ReplicaState
from rollout_engine.fleet.run.member import Member
from rollout_engine.fleet.run.replica_health import ReplicaHealth, ask_health
from rollout_engine.fleet.run.supervisor import Supervisor
from rollout_engine.fleet.run.together import call_all, call_one, is_refused

_WEIGHT_METHODS = ("begin_weight_update", "init_weight_update_group", "load_weights_from_storage")


class Load(NamedTuple):
    """The requests and KV tokens that a replica has in flight."""

    num_requests: int
    num_kv_tokens: int
    """Most KV tokens that these requests may hold."""


class FleetCalls:
    """Calls of verbs on the replicas of a fleet, whose lock guards `brain` and `members`."""

    def __init__(
        self,
        brain: Brain,
        members: Mapping[int, Member],
        supervisor: Supervisor,
        lock: "threading.RLock",
        is_over: Callable[[], bool],
    ) -> None:
        self._brain, self._members, self._supervisor = brain, members, supervisor
        self._lock, self._is_over = lock, is_over

    def on_all(self, name: str, arguments: Mapping[str, Any]) -> CallFuture:
        """Call a verb on every replica, or on one if any can answer for all: `Verb.combine`.

        A call on one that is lost meanwhile goes to another one.
        """
        verb = _check_call(name, arguments)
        with self._lock:
            take_back = self._supervisor.note_order(name, arguments)
            clients = [member.client for _, member in sorted(self._members.items())]
            serving = [self._members[index].client for index in self._brain.serving if index in self._members]
        if arguments.get("lora") is not None and not serving:  # others may have its values from before
            take_back()
            self._refuse_all(name, "serves")
        if not clients:
            take_back()
            self._refuse_all(name)
        if verb.combine is None:
            return call_one(verb, arguments, serving or clients, self._is_over)
        try:
            future = call_all(verb, arguments, clients, self._is_over)
        except BaseException:
            take_back()
            raise
        future.add_done_callback(lambda done: take_back() if is_refused(done) else None)
        return future

    def on_each(self, name: str, arguments: Mapping[str, Any]) -> CallFuture:
        """Call a verb on every replica; the future has a dictionary of their results, by replica.

        It raises `RetryableError` if one is lost before it has answered.
        """
        with self._lock:
            members = dict(sorted(self._members.items()))
        if not members:
            self._refuse_all(name)

        def by_replica(results: Sequence[Any]) -> dict[int, Any]:
            return dict(zip(members, results, strict=True))

        verb = msgspec.structs.replace(_check_call(name, arguments), combine=by_replica, needs_all=True)
        return call_all(verb, arguments, [member.client for member in members.values()], self._is_over)

    def on_one(self, replica: int, name: str, arguments: Mapping[str, Any]) -> CallFuture:
        """Call a verb on one replica. Raises `RequestError` for one that is not there.

        `RetryableError` if it has no engine at the moment, or is lost before it has answered.
        """
        with self._lock:
            self._require_there(replica)
            member = self._members.get(replica)
            if member is None:
                raise RetryableError(self._not_now(replica, "cannot answer"))
        verb = msgspec.structs.replace(_check_call(name, arguments), combine=lambda results: results[0], needs_all=True)
        return call_all(verb, arguments, [member.client], self._is_over)

    def require_serving(self, replica: int, argument: str = "replica_index") -> None:
        """Raise `RequestError` unless a replica is there, and `RetryableError` unless it takes requests.

        `argument`: the name that the caller's argument has.
        """
        with self._lock:
            self._require_there(replica, argument)
            if self._brain.replicas[replica].state is not ReplicaState.SYNCED:
                raise RetryableError(self._not_now(replica, "takes no requests", argument))

    def balancer_stats(self) -> BalancerStats:
        """How requests were routed so far, and the requests in flight."""
        with self._lock:
            return self._brain.balancer.stats

    def loads(self) -> dict[int, Load]:
        """The load that each serving replica has in flight, as counted by the fleet."""
        with self._lock:
            stats, serving = self.balancer_stats(), self._brain.serving
        return {index: Load(stats.num_requests[index], stats.num_kv_tokens[index]) for index in serving}

    def health(self) -> list[ReplicaHealth]:
        """The health of each replica, in the order of their indexes."""
        with self._lock:
            asked = [ask_health(each, self._members.get(index)) for index, each in self._brain.replicas.items()]
        return [answer() for answer in asked]

    def _refuse_all(self, name: str, what: str = "lives") -> None:
        if not self._is_over():
            what = f"{name}: no replica of the fleet {what} at the moment"
            raise RetryableError(f"{what}; they are started again: call it again a little later.")

    def _require_there(self, replica: int, argument: str = "replica_index") -> None:
        wanted = self._brain.wanted
        if type(replica) is not int or replica not in wanted:
            known = ", ".join(map(str, wanted))
            raise RequestError.for_field(argument, replica, f"the index of a replica: one of {known}")

    def _not_now(self, replica: int, what: str, argument: str = "replica_index") -> str:
        found = self._brain.replicas[replica]
        problem = f" ({found.problem})" if found.problem else ""
        advice = f"call again a little later, or leave {argument} out"
        return f"{argument}={replica}: that replica is {found.state} and {what} at the moment{problem}; {advice}."


def _check_call(name: str, arguments: Mapping[str, Any]) -> Verb:
    if arguments.get("method") in _WEIGHT_METHODS:
        what = f"collective_rpc: {arguments['method']} would change weights past the fleet"
        raise LifecycleError(f"{what}, and a replica that starts later would not have them: use update_weights.")
    return VERBS[name]
