"""Runs one case: a fleet file in, an outcome out."""

import time
from collections.abc import Callable

from rollout_engine.capacity.events import Events
from rollout_engine.capacity.fan_out import FanOut
from rollout_engine.capacity.fleet import SimulatedFleet
from rollout_engine.capacity.options import FleetFile
from rollout_engine.capacity.outcome import Outcome, summarize
from rollout_engine.capacity.training import Arrivals, Trainer, Updates
from rollout_engine.capacity.workload import Job, Workload

_JOBS_PER_REPORT = 256


class Simulation:
    """One run of a fleet file. `fleet`, `workload` and `events` can be looked at afterwards."""

    def __init__(self, file: FleetFile, on_progress: Callable[[int], object] = lambda num_samples: None) -> None:
        """`on_progress` is called now and then with the number of samples that have ended since.

        Raises `ConfigError` if tables do not fit each other.
        """
        file.check()
        self.file, self.events, self.fan_out = file, Events(), FanOut(file.weights, file.fleet)
        self.workload = Workload(file.workload, file.engine.block_size, file.seed)
        self.fleet = SimulatedFleet(file, self.workload, self.events, self.fan_out.stage_seconds, self._job_ended)
        self.updates = Updates(file, self.fleet, self.events, self.fan_out)
        kind = Arrivals if file.workload.arrives else Trainer
        self.user: Arrivals | Trainer = kind(file, self.workload, self.fleet, self.updates, self.events)
        self._on_progress, self._num_ended = on_progress, 0

    def run(self) -> Outcome:
        """Simulate to the end. Raises `EngineDeadError` if every replica fails for good."""
        start = time.perf_counter()
        self.events.plan(0.0, self.user.begin)
        self.events.run(lambda: self.user.is_done)
        assert self.user.is_done, "nothing is going to happen any more, and requests are open"
        self._on_progress(self._num_ended % _JOBS_PER_REPORT * self.workload.num_samples)
        return summarize(
            self.file,
            self.workload,
            self.fleet,
            batch_seconds=self.user.batch_seconds,
            staleness=self.user.staleness,
            updates=self.updates.records,
            update_gigabytes=self.fan_out.network_gigabytes,
            seconds=self.events.now,
            wall_seconds=time.perf_counter() - start,
            num_events=self.events.num_done,
        )

    def _job_ended(self, job: Job) -> None:
        self._num_ended += 1
        if self._num_ended % _JOBS_PER_REPORT == 0:
            self._on_progress(_JOBS_PER_REPORT * self.workload.num_samples)
        self.user.job_ended(job)
