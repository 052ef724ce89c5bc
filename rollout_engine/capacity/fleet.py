"""A simulated fleet: the brain of a real one, and simulated replicas that carry out its decisions."""

import random
from collections.abc import Callable, Iterable

from rollout_engine.base.errors import EngineDeadError
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, SequenceEnd
from rollout_engine.base.seeds import mix
from rollout_engine.capacity.costs import StepCosts
from rollout_engine.capacity.engine import EngineCounts, SimulatedEngine
from rollout_engine.capacity.events import Events
from rollout_engine.capacity.options import FleetFile
from rollout_engine.capacity.replica import SimulatedReplica, Timeline
from rollout_engine.capacity.sequences import EngineRequest, EngineSequence
from rollout_engine.capacity.workload import Job, Workload
from rollout_engine.fleet.plan.actions import Abort, Action, CatchUp, Fail, Send, Start, Stop, Tell
from rollout_engine.fleet.plan.brain import Brain

_SECONDS_PER_HOUR = 3600.0
_SHARED = "shared"


class FleetCounts:
    """Counts of the failures of replicas, and of their effects on requests."""

    def __init__(self) -> None:
        self.num_failures = self.num_moved = self.num_lost_tokens = self.num_carried_tokens = 0
        """Failures; sequences that continued elsewhere; their tokens that were sampled again, or taken along."""
        self.seconds_out = 0.0
        """Time of replicas out of service, summed over those that have returned."""


class SimulatedFleet:
    """Replicas, and the brain that directs them. `job_ended` is called for each job whose last sample has ended."""

    def __init__(
        self,
        file: FleetFile,
        workload: Workload,
        events: Events,
        stage_seconds: float,
        job_ended: Callable[[Job], None],
    ) -> None:
        table = file.fleet
        self.brain = Brain(table.make_balancer(), table.num_replicas)
        self.engine_counts, self.counts, self.timeline = EngineCounts(), FleetCounts(), Timeline()
        self.replicas: dict[int, SimulatedReplica] = {}
        """Those with an engine."""
        self.on_lost: Callable[[int], None] = lambda index: None
        self.on_idle: Callable[[], None] = lambda: None
        self.is_draining = False
        self._file, self._workload, self._events = file, workload, events
        self._stage_seconds, self._job_ended = stage_seconds, job_ended
        self._failure_times = random.Random(mix(file.seed, 3))
        num_slow = round(table.slow_share * table.num_replicas)
        self._slow = set(random.Random(mix(file.seed, 4)).sample(range(table.num_replicas), num_slow))
        self._gone_at: dict[int, float] = {}
        for index in range(table.num_replicas):
            self._start(index)

    def submit(self, numbers: Iterable[int]) -> None:
        """Send jobs, by number."""
        for number in numbers:
            self._workload.jobs[number].submitted_at = self._events.now
            self._do(self.brain.add_request(self._workload.request(number)))

    def record_commit(self, took: set[int], version: int) -> None:
        """Note that these replicas have committed a version, and that the others have missed it."""
        for index in self.brain.living:
            if index not in took and index in self.replicas:
                self._tell_tokens(self.replicas[index])
        self._do(self.brain.note_commit(took, version, self._events.now))

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(index, request):
                    if index in self.replicas:  # else it has failed, and that is about to be noticed
                        self.replicas[index].add(self._engine_request(request))
                case Abort(index, sequence_ids):
                    self._abort(index, sequence_ids)
                case Start(index, at):
                    self._events.plan(at + self._file.failures.restart_seconds, self._start, index)
                case CatchUp(index, at):
                    self._events.plan(max(at, self._events.now), self._catch_up, index)
                case Stop(index):
                    self.replicas.pop(index).stop()
                case Tell(ended):
                    self._report_aborts(end.sequence_id for end in ended)
                case Fail(reason):
                    raise EngineDeadError(f"The simulated fleet is dead after {self._events.now:.0f} s: {reason}.")

    def _start(self, index: int) -> None:
        costs = self._file.costs.costs
        if index in self._slow:
            costs = StepCosts(*(self._file.fleet.slow_factor * seconds for seconds in costs))
        version = self.brain.policy_version
        engine = SimulatedEngine(self._file.engine, costs, self.engine_counts, version)
        engine.on_first_token = self._first_token
        replica = SimulatedReplica(
            index,
            engine,
            self._events,
            self.timeline,
            self._report_ends,
            lambda: self.on_idle() if self.is_draining else None,
        )
        replica.is_draining = self.is_draining
        self.replicas[index] = replica
        if self._file.failures.mtbf_hours:
            rate = 1 / (_SECONDS_PER_HOUR * self._file.failures.mtbf_hours)
            at = self._events.now + self._failure_times.expovariate(rate)
            self._events.plan(at, self._fail, replica)
        self._do(self.brain.note_start(index, -1 if version else 0, self._events.now))
        self._note_service(index)

    def _fail(self, replica: SimulatedReplica) -> None:
        if self.replicas.get(replica.index) is not replica:
            return
        replica.stop()
        del self.replicas[replica.index]
        self.counts.num_failures += 1
        self._gone_at.setdefault(replica.index, self._events.now)
        self._events.plan(self._events.now + self._file.failures.detection_seconds, self._detect, replica)

    def _detect(self, replica: SimulatedReplica) -> None:
        sequences = [*replica.engine.sequences(), *replica.list_held()]
        num_tokens = sum(replica.engine.num_sampled(each) for each in sequences)
        self.counts.num_moved += sum(len(entry.live) for entry in self.brain.ledger.of_replica(replica.index))
        if self._file.failures.requests == "continue":
            self._tell_tokens(replica)
            self.counts.num_carried_tokens += num_tokens
        else:
            self.counts.num_lost_tokens += num_tokens
        self._do(self.brain.note_loss(replica.index, "it failed", self._events.now))
        self.on_lost(replica.index)

    def _tell_tokens(self, replica: SimulatedReplica) -> None:
        """Record in the ledger the tokens of sequences that have not ended: it needs them only when these move."""
        left = {
            each.sequence_id: replica.engine.num_sampled(each) - each.num_taken_over
            for each in replica.engine.sequences()
        }
        for each in replica.engine.sequences():
            each.num_taken_over = replica.engine.num_sampled(each)
        while left := {sequence_id: count for sequence_id, count in left.items() if count}:
            zeros = [0] * len(left)
            outputs = EngineCoreOutputs(
                replica.engine.version, sequence_ids=[*left], token_ids=zeros, kv_min_versions=zeros
            )
            self._do(self.brain.note_outputs(replica.index, outputs))
            left = {sequence_id: count - 1 for sequence_id, count in left.items()}

    def _catch_up(self, index: int) -> None:
        if index in self.replicas:
            version = self.brain.policy_version
            at = self._events.now + self._stage_seconds
            self._events.plan(at, self._caught_up, self.replicas[index], version)

    def _caught_up(self, replica: SimulatedReplica, version: int) -> None:
        if self.replicas.get(replica.index) is replica:
            replica.engine.commit(version, recompute=False)
            self._do(self.brain.has_weights(replica.index, version, self._events.now))
            self._note_service(replica.index)

    def _note_service(self, index: int) -> None:
        if index in self._gone_at and self.brain.replicas[index].state == "SYNCED":
            self.counts.seconds_out += self._events.now - self._gone_at.pop(index)

    def _abort(self, index: int, sequence_ids: list[int]) -> None:
        if index in self.replicas:
            self.replicas[index].abort(sequence_ids)
            ended = [SequenceEnd(sequence_id, "abort") for sequence_id in sequence_ids]
            self._do(self.brain.note_outputs(index, EngineCoreOutputs(0, ended=ended)))

    def _engine_request(self, request: EngineCoreRequest) -> EngineRequest:
        job, first = self._workload.find(request.first_sequence_id)
        block_size, num_shared = self._file.engine.block_size, self._workload.num_shared_tokens
        num_prompt = len(request.prompt_token_ids)
        num_full = num_prompt // block_size * block_size
        made = EngineRequest(num_prompt, [(_SHARED, num_shared), (job.prompt, num_full - num_shared)])
        made.sequences = [
            EngineSequence(made, request.first_sequence_id + i, job.lengths[first + i], len(request.output_token_ids))
            for i in range(request.params.n)
        ]
        return made

    def _first_token(self, sequence: EngineSequence, version: int) -> None:
        job, index = self._workload.find(sequence.sequence_id)
        if job.oldest[index] < 0:
            job.oldest[index] = version
        if job.first_token_at < 0:
            job.first_token_at = self._events.now

    def _report_ends(self, replica: SimulatedReplica, sequences: list[EngineSequence]) -> None:
        ended = [SequenceEnd(sequence.sequence_id, "length") for sequence in sequences]
        self._do(self.brain.note_outputs(replica.index, EngineCoreOutputs(replica.engine.version, ended=ended)))
        self._report_aborts(end.sequence_id for end in ended)

    def _report_aborts(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            job, _ = self._workload.find(sequence_id)
            job.num_left -= 1
            if not job.num_left:
                job.ended_at = self._events.now
                self._job_ended(job)
