"""The simulated trainer: batches in order, an update after each, and requests as far ahead as they may be."""

from collections.abc import Callable
from typing import NamedTuple

from rollout_engine.capacity.events import Events
from rollout_engine.capacity.fan_out import FanOut
from rollout_engine.capacity.fleet import SimulatedFleet
from rollout_engine.capacity.options import FleetFile
from rollout_engine.capacity.workload import Job, Workload


class UpdateRecord(NamedTuple):
    """An update that all replicas there have committed."""

    seconds: float
    """From its begin to the last commit."""
    drain_seconds: float
    """Until requests had ended, if it waits for them."""
    num_missed: int
    """Replicas that have failed meanwhile, and committed nothing."""


class Update:
    """One update on its way."""

    def __init__(self, version: int, began_at: float) -> None:
        self.version, self.began_at = version, began_at
        self.drained_at = began_at
        self.pending: set[int] = set()
        """Replicas that have not committed."""
        self.took: set[int] = set()
        self.num_members = 0


class Updates:
    """Brings new weights to a fleet: a drain if that is asked for, the way to each replica, each one's commit."""

    def __init__(self, file: FleetFile, fleet: SimulatedFleet, events: Events, fan_out: FanOut) -> None:
        self.records: list[UpdateRecord] = []
        self._file, self._fleet, self._events, self._fan_out = file, fleet, events, fan_out
        self._update: Update | None = None
        self._done: Callable[[], None] = lambda: None
        fleet.on_lost, fleet.on_idle = self._drop_replica, self._look_for_drain

    def begin(self, version: int, done: Callable[[], None]) -> None:
        """Begin an update; `done` is called with its last commit."""
        self._update, self._done = Update(version, self._events.now), done
        if self._file.training.mode == "wait":
            self._fleet.is_draining = True
            for replica in self._fleet.replicas.values():
                replica.is_draining = True
            self._look_for_drain()
        else:
            self._publish(self._update)

    def _look_for_drain(self) -> None:
        update = self._update
        if update is None or update.num_members or any(r.engine.has_work for r in self._fleet.replicas.values()):
            return
        update.drained_at = self._events.now
        self._publish(update)

    def _publish(self, update: Update) -> None:
        living = [index for index in self._fleet.brain.living if index in self._fleet.replicas]
        update.pending, update.num_members = set(living), max(len(living), 1)
        for index in living:
            at = self._events.now + self._fan_out.staged_seconds(index)
            self._events.plan(at, self._finish_staging, update, index)
        self._look_for_end(update)

    def _finish_staging(self, update: Update, index: int) -> None:
        replica = self._fleet.replicas.get(index)
        if index not in update.pending or replica is None:
            return

        def commit() -> None:
            if index in update.pending and self._fleet.replicas.get(index) is replica:
                update.pending.discard(index)
                update.took.add(index)
                self._look_for_end(update)

        recompute = self._file.training.kv == "recompute"
        replica.commit(update.version, self._file.weights.commit_seconds, commit, recompute=recompute)

    def _drop_replica(self, index: int) -> None:
        update = self._update
        if update is not None and index in update.pending | update.took:
            update.pending.discard(index)
            update.took.discard(index)
            self._look_for_end(update)
        self._look_for_drain()

    def _look_for_end(self, update: Update) -> None:
        if update.pending or self._update is not update:
            return
        if not update.took:  # all have failed: publish again for those that return
            self._events.plan(self._events.now + 1.0, self._publish, update)
            return
        self._update = None
        now = self._events.now
        num_missed = update.num_members - len(update.took)
        self.records.append(UpdateRecord(now - update.began_at, update.drained_at - update.began_at, num_missed))
        self._fleet.record_commit(update.took, update.version)
        self._fleet.is_draining = False
        for replica in [*self._fleet.replicas.values()]:
            replica.resume()
        self._done()


class Trainer:
    """Submits batches as `max_staleness` allows, trains on each that is complete, and has the fleet updated."""

    def __init__(self, file: FleetFile, workload: Workload, fleet: SimulatedFleet, updates: Updates, events: Events):
        self.batch_seconds: list[float] = []
        """From the submission of each batch to the end of its last sample."""
        self.staleness: list[int] = []
        """Of each sample that was trained on: the trainer's version less that of its first token."""
        self._file, self._workload, self._fleet = file, workload, fleet
        self._updates, self._events = updates, events
        self._num_left = [len(batch) for batch in workload.batches]
        """Jobs of each batch that have not ended."""
        self._num_submitted = self._num_trained = 0
        self._is_training = False

    @property
    def is_done(self) -> bool:
        """Whether the update after the last batch is complete."""
        return self._num_trained == len(self._num_left)

    def begin(self) -> None:
        """Submit as many batches as may be ahead."""
        last = self._num_trained + self._file.training.max_staleness
        while self._num_submitted < len(self._num_left) and self._num_submitted <= last:
            self._num_submitted += 1
            self._fleet.submit(self._workload.batches[self._num_submitted - 1])

    def job_ended(self, job: Job) -> None:
        """Count a job of a batch; the trainer takes the batch with its last one."""
        self._num_left[job.batch] -= 1
        self._train()

    def _train(self) -> None:
        batch = self._num_trained
        if self._is_training or self.is_done or self._num_left[batch]:
            return
        self._is_training = True
        jobs = [self._workload.jobs[number] for number in self._workload.batches[batch]]
        seconds = max(job.ended_at for job in jobs) - jobs[0].submitted_at
        self.staleness += [batch - version for job in jobs for version in job.oldest]
        self.batch_seconds.append(seconds)
        at = self._events.now + self._file.training.train_seconds
        self._events.plan(at, self._updates.begin, batch + 1, self._finish_update)

    def _finish_update(self) -> None:
        self._num_trained += 1
        self._is_training = False
        self.begin()
        self._train()


class Arrivals:
    """Prompts that arrive independently. If training takes time, weights are updated as often all the while."""

    def __init__(self, file: FleetFile, workload: Workload, fleet: SimulatedFleet, updates: Updates, events: Events):
        self._file, self._workload, self._fleet = file, workload, fleet
        self._updates, self._events = updates, events
        self._num_left, self._version = len(workload.jobs), 0
        self.batch_seconds: list[float] = []
        """Empty: nothing arrives in batches."""
        self.staleness: list[int] = []
        """Of each sample that has ended: the newest version less that of its first token."""

    @property
    def is_done(self) -> bool:
        """Whether all requests have ended."""
        return not self._num_left

    def begin(self) -> None:
        """Plan all arrivals, and the first update."""
        for at, numbers in self._workload.arrivals(self._file.seed):
            self._events.plan(at, self._fleet.submit, numbers)
        self._plan_update()

    def job_ended(self, job: Job) -> None:
        """Count a request."""
        self._num_left -= 1
        self.staleness += [self._version - version for version in job.oldest]

    def _plan_update(self) -> None:
        if self._file.training.train_seconds:
            at = self._events.now + self._file.training.train_seconds
            self._events.plan(at, self._updates.begin, self._version + 1, self._finish_update)

    def _finish_update(self) -> None:
        self._version += 1
        self._plan_update()
