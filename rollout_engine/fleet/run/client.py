"""The client of a fleet: an `EngineClient` over many, driven by `fleet.plan.brain`.

    face ── add_request, call ──> FleetClient ── Brain: who gets it? ──> ProcessClient of replica 0
         <── outputs ────────────             <── outputs ─────────────   ...          of replica n

One lock guards the brain. Outputs are delivered inside it: those of a lost replica reach the user before those that
another one sends after it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import EngineDeadError, LifecycleError, RetryableError, RolloutEngineError
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, UpdateOptions
from rollout_engine.base.metrics import CoreMetrics, ReplicaMetrics
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.base.threads import raise_if_cancelled
from rollout_engine.engine.calls import CallFuture
from rollout_engine.engine.client import ANYWHERE, Listener, Route
from rollout_engine.fleet.plan.balancer import Balancer
from rollout_engine.fleet.plan.brain import Brain
from rollout_engine.fleet.plan.replica_state import Replica, ReplicaState, describe_loss
from rollout_engine.fleet.run.adapters import ADAPTER_VERBS, FleetAdapters
from rollout_engine.fleet.run.calls import FleetCalls
from rollout_engine.fleet.run.dispatcher import Dispatcher
from rollout_engine.fleet.run.group_sleep import sleep_together, sleeps_behind_requests
from rollout_engine.fleet.run.groups import GroupProvider
from rollout_engine.fleet.run.kv_peers import introduce_kv_peers
from rollout_engine.fleet.run.member import Member
from rollout_engine.fleet.run.metrics import FleetMetrics
from rollout_engine.fleet.run.processes import ProcessProvider
from rollout_engine.fleet.run.provider import Provider, check_count
from rollout_engine.fleet.run.replica_health import ReplicaHealth
from rollout_engine.fleet.run.supervisor import Supervisor, start_replicas
from rollout_engine.fleet.run.updates import FleetUpdates, drain_requests
from sync.base import WeightSource
from sync.owner_process import OwnerProcess

logger = logging.getLogger("rollout_engine")

_LOOK_SECONDS = 0.05
"""How often a restart checks whether a replica serves."""


class FleetClient:
    """One user of a fleet. A replica that is lost is started again, and its requests continue at others."""

    index = 0
    needs_turns = False

    def __init__(self, config: EngineConfig, provider: Provider, members: Sequence[Member], balancer: Balancer) -> None:
        """`members`: replicas that have been started, in the order of their indexes; each starts with `config`."""
        self.info = members[0].client.info
        self._brain = Brain(balancer, len(members), policy_version=members[0].client.policy_version)
        self._members: dict[int, Member] = {}
        """Replicas that have an engine."""
        self._lock, self._process = threading.RLock(), OwnerProcess()
        self._adapters = FleetAdapters(
            config.max_loras, self._brain, self._members, self._lock, self._is_over, self._update_ended
        )
        self._updates = FleetUpdates(members[0].first_digest, self._adapters, self._lock)
        self._supervisor = Supervisor(provider, config, self._updates)
        self._groups = provider if isinstance(provider, GroupProvider) else None
        """Forms the groups of replicas that divide experts; None: each replica has the whole model."""
        self._dispatcher = Dispatcher(self, self._brain, self._members, self._supervisor)
        self._calls = FleetCalls(self._brain, self._members, self._supervisor, self._lock, self._is_over)
        self._metrics = FleetMetrics(self._brain, self._members, self._lock)
        with self._lock:
            for member in members:
                self.add_replica(member, lambda: True)

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        meanwhile: Callable[[], object] = lambda: None,
        *,
        num_replicas: int,
        provider: Provider | None = None,
        balancer: Balancer | None = None,
    ) -> Self:
        """Start a fleet, by default of processes of this machine, and wait until all replicas are loaded.

        `meanwhile` is called while they load. Raises `ConfigError` if there is no room for them, or the model cannot
        be served, and `EngineDeadError`; then nothing of it is left.
        """
        check_count(num_replicas)
        if config.data_parallel_size > 1:
            provider, num_replicas = GroupProvider.of(config, num_replicas, provider), config.data_parallel_size
        provider = ProcessProvider() if provider is None else provider
        with start_replicas(provider, config, num_replicas, meanwhile) as (config, members):
            return cls(config, provider, members, Balancer() if balancer is None else balancer)

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why nothing can be computed any more; None while something can."""
        return self._dispatcher.dead_error

    @property
    def policy_version(self) -> int:
        """The newest version that a replica has committed; only those that have it serve."""
        return self._brain.policy_version

    def listen(self, listener: Listener) -> None:
        """Set the listener for outputs. Call it before the first request is added."""
        self._dispatcher.listener = listener

    @property
    def calls(self) -> FleetCalls:
        """Calls on one replica, or on each separately. Raises as `require_usable`."""
        self.require_usable()
        return self._calls

    def add_request(self, request: EngineCoreRequest, route: Route = ANYWHERE) -> None:
        """Send a request to a replica. Raises `RequestError` and `RetryableError` for one that cannot take it now."""
        self.require_usable()
        session_id, replica = route
        with self._lock:
            self.require_usable()
            if replica is not None:
                self._calls.require_serving(replica)
            if request.lora:
                self._adapters.use(request.lora)
            try:
                self._dispatcher.do(self._brain.add_request(request, session_id, replica), raises=True)
            except BaseException:
                self._dispatcher.do(self._brain.note_refusal(request.first_sequence_id)[1])
                raise

    def abort(self, sequence_ids: list[int]) -> None:
        """End sequences; unknown ids are a no-op."""
        self._require_own_process()
        with self._lock:
            self._dispatcher.do(self._brain.abort_sequences(sequence_ids))

    def call(self, name: str, arguments: Mapping[str, Any]) -> CallFuture:
        """Call a verb on every replica, or on one if any can answer for all: `Verb.combine`.

        Verbs on adapters change all replicas, or none.
        """
        if name in ADAPTER_VERBS:
            self.require_usable()
            return self._adapters.call(name, arguments)
        if self._groups is not None and sleeps_behind_requests(name, arguments):
            return sleep_together(self.calls.on_all, arguments)
        return self.calls.on_all(name, arguments)

    def update_weights(self, source: WeightSource, version: int | None, options: UpdateOptions) -> UpdateReport:
        """Give all replicas new weights: published once, staged by each, committed by each between two of its steps.

        A replica that fails while another one commits serves nothing before it has caught up; with weights of the draft
        model, which change no result, it continues to serve. Raises if all fail. Blocks.
        """
        self.require_usable()
        with self._updates.one_at_a_time(), self._adapters.unchanged(options.timeout):
            with self._lock:
                members = dict(self._members)
            with drain_requests(self, options) as options:
                ended = partial(self._draft_ended if options.draft else self._update_ended, members)
                live = self.policy_version
                return self._updates.push_to_replicas(members, source, version, options, live, ended)

    def turn(self, has_news: Callable[[], bool]) -> bool:
        """Return False: steps are computed by the replicas."""
        self._require_own_process()
        return False

    def replicas(self) -> list[ReplicaHealth]:
        """The health of each replica, in the order of their indexes."""
        self.require_usable()
        return self._calls.health()

    def metrics(self, seconds: float | None = None) -> tuple[CoreMetrics, dict[int, ReplicaMetrics]]:
        """The sum of all replicas, and each by its index, waiting `seconds` at most. Raises as `require_usable`."""
        self.require_usable()
        return self._metrics.read(seconds)

    def scale(self, num_replicas: int) -> None:
        """Scale to `num_replicas`. New ones serve once they are loaded; requests of removed ones end first.

        Replicas that divide experts are all replaced, by a group of that size: once it is loaded, requests in flight
        continue there. Raises `RetryableError` if the last such change has not ended.
        """
        self.require_usable()
        check_count(num_replicas)
        with self._updates.one_at_a_time():
            num_present = len(self._brain.wanted)
            num_more = num_replicas - (num_present if self._groups is None else 0)
            if num_more > 0 and num_replicas != num_present:
                self._supervisor.check(num_more, num_present)  # it may take seconds: outputs are still delivered
            with self._lock:
                self.require_usable()
                if self._groups is None:
                    self._dispatcher.do(self._brain.scale_to(num_replicas, time.monotonic()))
                elif num_replicas != num_present:
                    self._dispatcher.do(self._brain.replace_all(num_replicas, self._groups.plan, time.monotonic()))

    def restart(self) -> None:
        """Restart the engine of every replica, one after the other; the others serve meanwhile. Blocks.

        Replicas that divide experts are replaced by a group of the same size, as by `scale`. Raises `RetryableError`
        if one does not restart; those after it have not been restarted then.
        """
        if self._groups is not None:
            return self._replace_group(self._groups)
        for index in list(self._brain.wanted):
            self.require_usable()
            with self._lock:
                self._dispatcher.do(self._brain.restart_replica(index, time.monotonic()))
            _wait_until_settled(self._brain.replicas[index], self.require_usable)

    def check_integrity(self) -> None:
        """Recount requests, tokens and replicas; an AssertionError names any mismatch."""
        with self._lock:
            self._brain.check_integrity()

    def require_usable(self) -> None:
        """Raise `LifecycleError` in a forked child and after shutdown, `EngineDeadError` once no replica is left."""
        self._require_own_process()
        if self._supervisor.is_closed:
            raise LifecycleError("The engine is shut down; make a new one.")
        if self.dead_error is not None:
            raise EngineDeadError(*self.dead_error.args)

    def shutdown(self) -> None:
        """End all replicas. Calling it again is a no-op."""
        if not self._process.is_current or self._supervisor.is_closed:
            return
        with self._lock:
            members = list(self._members.values())
            self._members.clear()
            self._supervisor.close()
        self._supervisor.end(members)
        self._updates.close()
        self._dispatcher.fail_all(self.dead_error or EngineDeadError("The engine is shut down; make a new one."))

    def add_replica(self, member: Member, is_current: Callable[[], bool]) -> bool:
        """Add a replica that has an engine, if the state that it was put into `is_current`."""
        with self._lock:
            if not is_current() or self._supervisor.is_closed:
                return False
            version = self._updates.version_of(member)
            self._members[member.index] = member
            member.join(self)
            self._dispatcher.do(self._brain.note_start(member.index, version, time.monotonic()))
            if (problem := member.client.ending) is not None:  # since before it was joined: not reported here
                self.handle_loss(member, problem)
            self._settle_replacement()
            self._bring_drafts()
            if self.info.kv_handshake:
                introduce_kv_peers(self._members)
            return True

    def not_started(self, index: int, problem: Exception) -> None:
        """Note that a replica did not start."""
        reason = problem.cause if isinstance(problem, EngineDeadError) else str(problem).rstrip(".")
        with self._lock:
            actions = self._brain.note_loss(index, reason, time.monotonic())
            logger.warning(
                "replica %d did not start: %s. %s", index, reason, describe_loss(self._brain.replicas[index])
            )
            self._dispatcher.do(actions)
            self._settle_replacement()

    def lags(self, member: Member) -> bool:
        """Whether a replica still has to catch up: an update may have overtaken it."""
        with self._lock:
            state = self._brain.replicas[member.index].state
            return self._members.get(member.index) is member and state is ReplicaState.STALE

    def caught_up(self, member: Member, version: int) -> None:
        """Note that a replica has got the newest weights and adapters, as they were."""
        with self._lock:
            if self._members.get(member.index) is member:
                version = -1 if self._adapters.lags(member) else version
                self._dispatcher.do(self._brain.has_weights(member.index, version, time.monotonic()))
                self._settle_replacement()

    def not_caught_up(self, member: Member, problem: Exception) -> None:
        """Note that a replica did not get the newest weights."""
        logger.warning("replica %d did not catch up: %s", member.index, problem)
        with self._lock:
            if self._members.get(member.index) is member:
                self._dispatcher.do(self._brain.note_failed_catch_up(member.index, str(problem), time.monotonic()))

    def deliver_outputs(self, member: Member, outputs: EngineCoreOutputs) -> None:
        """Deliver the outputs of a replica's step."""
        with self._lock:
            if self._members.get(member.index) is member:
                actions = self._brain.note_outputs(member.index, outputs)
                self._dispatcher.deliver(outputs)
                self._dispatcher.do(actions)
                if not self._updates.is_updating:
                    self._dispatcher.do(
                        self._brain.note_version(member.index, outputs.policy_version, time.monotonic())
                    )

    def handle_refusal(self, member: Member, sequence_id: int, error: RolloutEngineError) -> None:
        """Note that a replica did not take a request: others are tried, or the user gets the error."""
        with self._lock:
            if self._members.get(member.index) is member:
                self._dispatcher.refuse(member.index, sequence_id, error)

    def handle_loss(self, member: Member, error: EngineDeadError) -> None:
        """Continue without a replica."""
        with self._lock:
            if self._members.get(member.index) is member:
                lost, moving = self._brain.replicas[member.index], len(self._brain.ledger.of_replica(member.index))
                del self._members[member.index]
                self._supervisor.retire(member)
                actions = self._brain.note_loss(member.index, error.cause, time.monotonic())
                moving = 0 if self._brain.is_dead else moving  # else they fail
                outlook = describe_loss(lost, moving, others_serve=bool(self._brain.serving))
                logger.error("replica %d is lost: %s. %s", member.index, error.cause, outlook)
                self._dispatcher.do(actions)
                self._settle_replacement()

    def _update_ended(
        self, members: Mapping[int, Member], reports: Mapping[int, UpdateReport], in_doubt: Iterable[int]
    ) -> None:
        """Note how an update has ended at members, of which some may have been restarted meanwhile."""
        with self._lock:
            now, same = time.monotonic(), {index for index in members if self._members.get(index) is members[index]}
            if reports:
                version = next(iter(reports.values())).version
                actions = self._brain.note_commit(same & reports.keys(), version, now)
            else:
                strayed = sorted(same.intersection(in_doubt))
                actions = self._brain.note_unknown_weights(strayed, now, can_catch_up=self._updates.has_any)
            self._dispatcher.do(actions)
            self._settle_replacement()

    def _draft_ended(
        self, members: Mapping[int, Member], reports: Mapping[int, UpdateReport], in_doubt: Iterable[int]
    ) -> None:
        """Note which replicas have the draft model's new weights."""
        with self._lock:
            if (newest := self._updates.draft.newest) is not None:
                for index in reports:
                    members[index].draft_digest = newest.digest
            self._bring_drafts()

    def _bring_drafts(self) -> None:
        """Have replicas that lack the draft model's newest weights get them, while they serve."""
        for member in self._members.values():
            if self._updates.lacks_draft(member):
                self._supervisor.bring_draft(member)

    def _replace_group(self, groups: GroupProvider) -> None:
        """Replace all replicas by a new group of the same size, and wait until it serves."""
        with self._updates.one_at_a_time():
            size = len(self._brain.wanted)
            self._supervisor.check(size, size)
            with self._lock:
                self.require_usable()
                self._dispatcher.do(self._brain.replace_all(size, groups.plan, time.monotonic()))
                replicas = [self._brain.replicas[index] for index in self._brain.successors]
        for replica in replicas:
            _wait_until_settled(replica, self.require_usable)

    def _settle_replacement(self) -> None:
        """Have the replicas of a new group take over, once all of them serve."""
        if self._brain.successors:
            self._dispatcher.do(self._brain.settle_replacement(time.monotonic()))

    def _is_over(self) -> bool:
        return self._supervisor.is_closed or self.dead_error is not None

    def _require_own_process(self) -> None:
        if not self._process.is_current:
            raise LifecycleError(self._process.error_message("The engine"))


def _wait_until_settled(replica: Replica, check: Callable[[], object]) -> None:
    """Wait until a replica that starts serves, or is removed. `check` is called meanwhile; its error ends the wait.

    Raises `RetryableError` if it is given up.
    """
    while replica.state in (ReplicaState.STARTING, ReplicaState.STALE):
        check()
        raise_if_cancelled()
        time.sleep(_LOOK_SECONDS)
    if replica.state is ReplicaState.DEAD:
        what = f"restart: replica {replica.index} did not come back ({replica.problem or 'it was scaled away'})"
        raise RetryableError(f"{what}; the others serve on. Scale the fleet, or call again to go on with the rest.")
