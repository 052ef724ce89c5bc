"""The brain of a fleet: it receives the events of replicas, and returns actions for others to carry out.

                    started            caught up
    (lost) STARTING ───────> STALE ────────────────> SYNCED <── only these get requests
      ^        │ start       │  ^ missed a commit       │
      │        │ failed      │  └─────────────────────  │
      └────────┴──── lost ───┴───────── lost ───────────┘           DRAINING ──> DEAD: scaled away, or given up

A replica whose weights are not the fleet's newest serves nothing. Time is passed as an argument, in seconds.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from rollout_engine.base.errors import RetryableError
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, SequenceEnd
from rollout_engine.base.version_pin import check_standing, describe_end, standing_of
from rollout_engine.fleet.plan.actions import Abort, Action, CatchUp, Fail, Send, Start, Stop, Tell
from rollout_engine.fleet.plan.balancer import Balancer
from rollout_engine.fleet.plan.ledger import Entry, Ledger
from rollout_engine.fleet.plan.replica_state import MAX_FAILURES, Replica, ReplicaState, backoff, problems_of

logger = logging.getLogger("rollout_engine")

_PROVEN_SECONDS = 60.0
"""Seconds of service after which a replica's earlier failures count no more."""


class Brain:
    """Decides which replica gets a request, and how requests and replicas recover when one fails."""

    def __init__(self, balancer: Balancer, num_replicas: int, *, policy_version: int = 0) -> None:
        self.balancer, self.ledger = balancer, Ledger()
        self.policy_version = policy_version
        """The newest version that a replica has committed."""
        self.replicas = {index: Replica(index) for index in range(num_replicas)}
        self._waiting: deque[Entry] = deque()
        """Requests that no replica has, oldest first: none serves, or they ask for a later policy version."""
        self.successors: tuple[int, ...] = ()
        """Replicas that replace all others, and serve, once all of them are SYNCED."""

    @property
    def serving(self) -> list[int]:
        """Replicas that get requests."""
        synced = [replica.index for replica in self.replicas.values() if replica.state is ReplicaState.SYNCED]
        return [index for index in synced if index not in self.successors]

    @property
    def living(self) -> list[int]:
        """Replicas with an engine."""
        return [replica.index for replica in self.replicas.values() if replica.lives]

    @property
    def wanted(self) -> list[int]:
        """Replicas that exist or are to start, without those that are being removed."""
        gone = (ReplicaState.DEAD, ReplicaState.DRAINING)
        return [index for index, replica in self.replicas.items() if replica.state not in gone]

    @property
    def is_dead(self) -> bool:
        """Whether no replica is left, and none will start."""
        return all(replica.state is ReplicaState.DEAD for replica in self.replicas.values())

    def add_request(
        self, request: EngineCoreRequest, session_id: str | None = None, replica: int | None = None
    ) -> list[Action]:
        """Take a request. It waits if no replica serves. `replica`: one that serves, and is to get it.

        One for a later policy version waits here until a commit of that is noted. Raises `RequestError` for one that is
        past, and `RetryableError` for one that does not wait.
        """
        check_standing(request.params, self.policy_version)
        return self._place(self.ledger.add(request, session_id), replica)

    def abort_sequences(self, sequence_ids: Iterable[int]) -> list[Action]:
        """End sequences. Ids that are unknown, or have ended, are a no-op."""
        actions: list[Action] = []
        for replica, ids in self.ledger.record_abort(sequence_ids).items():
            if replica is not None:
                actions.append(Abort(replica, ids))
            else:
                self._forget(self.ledger.end(ids))
                actions.append(Tell([SequenceEnd(sequence_id, "abort") for sequence_id in ids]))
        return actions

    def note_outputs(self, replica: int, outputs: EngineCoreOutputs) -> list[Action]:
        """Note the outputs of a replica's step, after removing those that it must no longer report."""
        self._forget(self.ledger.record_outputs(replica, outputs))
        return self._end_drained(replica)

    def note_refusal(
        self, sequence_id: int, replica: int | None = None, *, others_may: bool = False
    ) -> tuple[int | None, list[Action]]:
        """Note that a replica, by default the one that has it, did not take the request that begins with a sequence.

        `others_may`: another one may take it, so each that serves is tried. Returns the user's first sequence id of it;
        None if it continues elsewhere, or has ended.
        """
        entry = self.ledger.get(sequence_id)
        was_taken = replica is not None and self.ledger.record_refusal(replica, sequence_id)
        if entry is None or was_taken or replica not in (None, entry.replica):
            return None, []
        holder, live = entry.replica, list(entry.live)
        if holder is not None and others_may and not entry.refused_by.issuperset({*self.serving} - {holder}):
            moved = self._move(entry, holder, has_refused=True)
            self.ledger.record_refusal(holder, sequence_id)
            return None, [Abort(holder, live), *self._end_drained(holder), *moved]
        self._forget(self.ledger.end(live))
        rest: list[Action] = [] if holder is None else [Abort(holder, live), *self._end_drained(holder)]
        return entry.request.first_sequence_id, rest

    def note_start(self, replica: int, policy_version: int, now: float) -> list[Action]:
        """Note that a replica's engine has started, with weights of this version."""
        found = self.replicas[replica]
        if found.state is not ReplicaState.STARTING:  # scaled away meanwhile
            return [Stop(replica)]
        found.state = ReplicaState.STALE
        return self.has_weights(replica, policy_version, now)

    def has_weights(self, replica: int, policy_version: int, now: float) -> list[Action]:
        """Note that a replica has weights of this version now: it serves, or has to catch up."""
        found = self.replicas[replica]
        if found.state is not ReplicaState.STALE:  # an update has overtaken it
            return []
        found.has(policy_version)
        if policy_version == self.policy_version:
            return self._serve([found], now)
        return [*self._stale(found, now), CatchUp(replica, now)]

    def note_commit(self, replicas: Iterable[int], policy_version: int, now: float) -> list[Action]:
        """Note that these replicas have committed the weights of an update; the others that live have missed it."""
        self.policy_version = policy_version
        actions: list[Action] = []
        took = set(replicas)
        living = [self.replicas[index] for index in self.living]
        for replica in living:
            if replica.index not in took:
                actions += self._missed_commit(replica, now)
        ready = [replica for replica in living if replica.index in took]
        for replica in ready:
            replica.has(policy_version)
        return [*actions, *self._serve([each for each in ready if each.state is ReplicaState.STALE], now)]

    def note_unknown_weights(self, replicas: Iterable[int], now: float, *, can_catch_up: bool) -> list[Action]:
        """Note that these replicas have unknown weights: an update failed there, and no other one took it.

        `can_catch_up`: whether there was an update before; else they restart, with the weights of the checkpoint.
        """
        actions: list[Action] = []
        for replica in (self.replicas[index] for index in replicas):
            if not (can_catch_up or replica.state is ReplicaState.DRAINING):
                actions += self.restart_replica(replica.index, now)
            elif replica.lives:
                actions += self._missed_commit(replica, now)
        return actions

    def note_failed_catch_up(self, replica: int, problem: str, now: float) -> list[Action]:
        """Note that a replica could not catch up. It tries again, later each time, and is given up in the end."""
        found = self.replicas[replica]
        if found.state is not ReplicaState.STALE:
            return []
        found.num_missed += 1
        found.problem = problem
        if found.num_missed < MAX_FAILURES:
            return [CatchUp(replica, now + backoff(found.num_missed))]
        found.num_failures += 1
        return [Stop(replica), *self._restart(found, now)]

    def note_loss(self, replica: int, problem: str, now: float) -> list[Action]:
        """Note a replica whose engine is gone or could not start: its requests continue elsewhere, and it restarts."""
        found = self.replicas[replica]
        if found.state is ReplicaState.DEAD:
            return []
        self._leave(found, now)
        found.problem, found.num_failures = problem, found.num_failures + 1
        again = self._end(found) if found.state is ReplicaState.DRAINING else self._restart(found, now)
        return [*again, *self._move_requests(found)]

    def note_version(self, replica: int, policy_version: int, now: float) -> list[Action]:
        """Note that a replica has computed with weights of this version, and no update is under way.

        If that is not the fleet's version, something else than an update has changed them: it is restarted.
        """
        found = self.replicas[replica]
        if policy_version in found.versions or found.state is not ReplicaState.SYNCED:
            return []
        what = f"it computes with weights of version {policy_version}, which no update of the fleet has given it"
        found.problem = f"{what} (version {self.policy_version} is the newest): a worker extension, perhaps"
        logger.error("replica %d is started anew: %s", replica, found.problem)
        return self.restart_replica(replica, now)

    def restart_replica(self, replica: int, now: float) -> list[Action]:
        """Restart the engine of a living replica; its requests continue elsewhere. It does not count as a failure."""
        found = self.replicas[replica]
        if found.state not in (ReplicaState.STALE, ReplicaState.SYNCED):
            return []
        moved = self._stale(found, now)
        found.state, found.policy_version, found.num_missed = ReplicaState.STARTING, -1, 0
        self.ledger.record_loss(replica)
        return [*moved, Stop(replica), Start(replica, now)]

    def scale_to(self, num_replicas: int, now: float) -> list[Action]:
        """Scale to `num_replicas`: new ones start; those with the highest indexes end after their requests."""
        keep = self.wanted
        actions: list[Action] = []
        for index in keep[num_replicas:]:
            replica = self.replicas[index]
            was_there = replica.lives
            self._leave(replica, now)
            replica.state = ReplicaState.DRAINING if was_there else ReplicaState.DEAD
            actions += self._end_drained(index)
        for index in range(len(self.replicas), len(self.replicas) + num_replicas - len(keep)):
            self.replicas[index] = Replica(index)
            actions.append(Start(index, now))
        return actions

    def replace_all(self, num_replicas: int, plan: Callable[[Sequence[int]], object], now: float) -> list[Action]:
        """Start as many replicas, which will replace all others. `plan` is called with their indexes first.

        Raises `RetryableError` if earlier ones have not done so yet.
        """
        if self.successors:
            raise RetryableError("scale: the last change of the number of replicas has not ended; call again later.")
        first = len(self.replicas)
        self.successors = tuple(range(first, first + num_replicas))
        plan(self.successors)
        self.replicas |= {index: Replica(index) for index in self.successors}
        return [Start(index, now) for index in self.successors]

    def settle_replacement(self, now: float) -> list[Action]:
        """End the replicas that successors replace, once all of these are SYNCED: requests continue there.

        If a successor is given up, they all are, and the others stay.
        """
        new = [self.replicas[index] for index in self.successors]
        states = {each.state for each in new}
        if ReplicaState.DEAD in states:
            gone, self.successors = new, ()
            logger.error("the fleet keeps its replicas: those that were to replace them did not start")
        elif states == {ReplicaState.SYNCED}:
            gone = [each for index, each in self.replicas.items() if index not in self.successors]
            self.successors = ()
        else:
            return []
        actions = [] if gone is new else self._serve(new, now)
        for each in (each for each in gone if each.state is not ReplicaState.DEAD):
            lived = each.lives
            actions += [] if gone is new else self._stale(each, now)
            actions += [*([Stop(each.index, answers_first=True)] if lived else []), *self._end(each)]
        return actions

    def check_integrity(self) -> None:
        """Raise AssertionError if a request is nowhere, or at a replica that must not have it."""
        _check_fleet(self.ledger, list(self._waiting), list(self.replicas.values()), self.policy_version)
        standings = {standing_of(entry.request.params, self.policy_version) for entry in self._waiting}
        assert "in range" not in standings or not self.serving, "requests wait while a replica serves"

    def _place(self, entry: Entry, replica: int | None = None) -> list[Action]:
        """Send the rest of a request to this replica, or the one that the balancer names, or let it wait."""
        requests, ends = self.ledger.rest(entry)
        actions: list[Action] = [Tell(ends)] if ends else []
        self.ledger.end(end.sequence_id for end in ends)
        if not entry.live:
            return actions
        if self.is_dead:
            return [*actions, Fail(problems_of(self.replicas.values()))]
        params, is_whole = entry.request.params, requests[0] is entry.request
        has_tokens = not is_whole and any(each.output_token_ids for each in requests)
        match standing_of(params, self.policy_version, has_tokens=has_tokens):
            case "over":
                why, live = describe_end(params, self.policy_version), list(entry.live)
                self.ledger.end(live)
                return [*actions, Tell([SequenceEnd(sequence_id, "abort", error=why) for sequence_id in live])]
            case "early":
                entry.wanted = replica if entry.wanted is None else entry.wanted
                self._waiting.append(entry)
                return actions
        if entry.wanted is not None:
            replica, entry.wanted = (entry.wanted if entry.wanted in self.serving else None), None
        return [*actions, *self._send(entry, requests, replica)]

    def _send(self, entry: Entry, requests: list[EngineCoreRequest], replica: int | None) -> list[Action]:
        """Send a request, as `requests`, to this replica or the one that the balancer names, or let it wait."""
        try:
            if replica is None:
                prompt, session_id = entry.request.prompt_token_ids, entry.session_id
                replica = self.balancer.choose(prompt, session_id=session_id, excluding=entry.refused_by)
        except LookupError:
            self._waiting.append(entry)
            return []
        entry.replica, entry.is_whole = replica, requests[0] is entry.request
        self.balancer.began(replica, entry.num_kv_tokens)
        return [Send(replica, request) for request in requests]

    def _move_requests(self, replica: Replica) -> list[Action]:
        """Move the requests of a replica to others."""
        actions: list[Action] = []
        for entry in self.ledger.of_replica(replica.index):
            actions += self._move(entry, replica.index, replica_lives=replica.lives)
        return actions

    def _move(
        self, entry: Entry, replica: int, *, replica_lives: bool = True, has_refused: bool = False
    ) -> list[Action]:
        self.ledger.moves(entry, replica_lives=replica_lives, has_refused=has_refused)
        self.balancer.ended(replica, entry.num_kv_tokens)
        return self._place(entry)

    def _serve(self, replicas: Iterable[Replica], now: float) -> list[Action]:
        for replica in replicas:
            replica.state, replica.synced_at, replica.num_missed = ReplicaState.SYNCED, now, 0
            if replica.index not in self.successors:
                self.balancer.add(replica.index)
        waiting, self._waiting = self._waiting, deque()
        return [action for entry in waiting for action in self._place(entry)]

    def _stale(self, replica: Replica, now: float) -> list[Action]:
        """Take a replica out of service; its requests continue at others."""
        self._leave(replica, now)
        if replica.state is ReplicaState.SYNCED:
            replica.state = ReplicaState.STALE
        had = [id for entry in self.ledger.of_replica(replica.index) for id in entry.live]
        return [*([Abort(replica.index, had)] if had else []), *self._move_requests(replica)]

    def _missed_commit(self, replica: Replica, now: float) -> list[Action]:
        moved = self._stale(replica, now)
        return [*moved, *(self._end_drained(replica.index) or [CatchUp(replica.index, now)])]

    def _leave(self, replica: Replica, now: float) -> None:
        if replica.state is ReplicaState.SYNCED:
            if replica.index not in self.successors:
                self.balancer.remove(replica.index)
            if now - replica.synced_at >= _PROVEN_SECONDS:
                replica.num_failures = 0

    def _restart(self, replica: Replica, now: float) -> list[Action]:
        replica.policy_version, replica.num_missed = -1, 0
        self.ledger.record_loss(replica.index)
        if replica.num_failures >= MAX_FAILURES:
            return self._end(replica)
        replica.state = ReplicaState.STARTING
        return [Start(replica.index, now + backoff(replica.num_failures))]

    def _end_drained(self, replica: int) -> list[Action]:
        found = self.replicas[replica]
        if found.state is not ReplicaState.DRAINING or self.ledger.of_replica(replica):
            return []
        return [Stop(replica), *self._end(found)]

    def _end(self, replica: Replica) -> list[Action]:
        """End a replica for good. Requests that wait fail with the last one."""
        replica.state = ReplicaState.DEAD
        self.ledger.record_loss(replica.index)
        return [Fail(problems_of(self.replicas.values()))] if self.is_dead else []

    def _forget(self, ended: Iterable[Entry]) -> None:
        for entry in ended:
            if entry.replica is None:
                if entry in self._waiting:  # else it was about to be placed
                    self._waiting.remove(entry)
            else:
                self.balancer.ended(entry.replica, entry.num_kv_tokens)


def _check_fleet(ledger: Ledger, waiting: Sequence[Entry], replicas: Sequence[Replica], policy_version: int) -> None:
    """Raise AssertionError if requests or replicas are inconsistent, in a fleet that has not failed."""
    ledger.check_integrity()
    if any(replica.state is not ReplicaState.DEAD for replica in replicas):
        _check_requests(ledger, waiting, replicas)
        _check_replicas(ledger, replicas, policy_version)


def _check_requests(ledger: Ledger, waiting: Sequence[Entry], replicas: Sequence[Replica]) -> None:
    """Raise AssertionError if a request is nowhere, or at a replica that must not have it."""
    assert len(set(waiting)) == len(waiting), "a request waits twice"
    for entry in ledger.entries():
        assert (entry in waiting) == (entry.replica is None), f"request {entry.request.first_sequence_id} is lost"
        if entry.replica is not None:
            state = replicas[entry.replica].state
            assert state in (ReplicaState.SYNCED, ReplicaState.DRAINING), f"a {state} replica has a request"


def _check_replicas(ledger: Ledger, replicas: Iterable[Replica], policy_version: int) -> None:
    """Raise AssertionError if a replica serves other weights than the fleet's, or drains without a request."""
    for replica in replicas:
        if replica.state is ReplicaState.SYNCED:
            assert replica.policy_version == policy_version, f"replica {replica.index} serves stale weights"
        elif replica.state is ReplicaState.DRAINING:
            assert ledger.of_replica(replica.index), f"replica {replica.index} drains without a request"
