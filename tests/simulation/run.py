"""One simulated run: a seed decides the engine's options, its users' operations, its failures and every switch."""

import hashlib
import logging
from collections import Counter
from contextlib import contextmanager
from typing import Any

from tests.simulation.brain_fleet import patched
from tests.simulation.brain_scenario import run_brain
from tests.simulation.brain_world import World
from tests.simulation.choices import Choices
from tests.simulation.clock import SimulatedClock
from tests.simulation.core_process import process_patches
from tests.simulation.faults import RandomFaults
from tests.simulation.fleet import Published
from tests.simulation.fleet_scenario import MAX_PAUSES as MAX_FLEET_PAUSES
from tests.simulation.fleet_scenario import run_fleet
from tests.simulation.scenarios import run_in_process, run_own_process
from tests.simulation.scheduler import MAX_PAUSES, Carriers, Scheduler
from tests.simulation.seams import simulated, stand_ins
from tests.simulation.transport import SimulatedTransport


class Run:
    """One run, and what is known of it afterwards: of an engine in process if the seed is even, else in its own."""

    max_pauses = MAX_PAUSES

    def __init__(self, seed: int, limit: int | None = None) -> None:
        self.seed, self.limit = seed, limit
        self.ends: Counter[str] = Counter()
        """How requests ended -> how many."""
        self.outcomes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._lines: list[tuple[float, str, str]] = []
        self.num_choices = 0

    def go(self, carriers: Carriers) -> "Run":
        """Carry it out. Raises nothing: `error` is what it found."""
        choices = Choices(self.seed, self.limit)
        restlessness = choices.pick([0.1, 0.02, 0.4])
        clock = SimulatedClock()
        scheduler = Scheduler(choices, clock, carriers, restlessness=restlessness, max_pauses=self.max_pauses)
        faults = RandomFaults(scheduler)
        transport = SimulatedTransport(scheduler, lambda: faults.reach("connect"))
        wire = {"zmq": transport, "Waker": transport.Waker}
        replacements = stand_ins(scheduler, lambda: faults.reach("thread")) | wire

        patches = [*process_patches(scheduler, faults), *self._patches(faults)]

        def main() -> None:
            faults.is_on = False
            self._scenario(scheduler, faults, transport)

        try:
            with simulated(scheduler, replacements, patches), _silent():
                scheduler.run(main)
        except Exception as error:
            self.error = error
        self._lines, self.num_choices, self.faults = scheduler.log, choices.num_made, faults.counts
        return self

    def _patches(self, faults: RandomFaults) -> list[tuple[Any, str, Any]]:
        return []

    def _scenario(self, scheduler: Scheduler, faults: RandomFaults, transport: SimulatedTransport) -> None:
        if self.seed % 2:
            run_own_process(scheduler, faults, transport, self.outcomes, self.ends)
        else:
            run_in_process(scheduler, faults, self.outcomes, self.ends)

    def lines(self) -> list[str]:
        """The log: seconds, task, what happened."""
        end = [] if self.error is None else [f"FAILED {type(self.error).__name__}: {self.error}"]
        return [f"{seconds:12.6f} {task:14} {what}" for seconds, task, what in self._lines] + end

    def shortest(self, carriers: Carriers | None = None) -> "Run":
        """The run of this seed with the fewest choices that fails by the same kind of error."""
        assert self.error is not None, "only a run that fails is made shorter"
        found, low, high = self, 0, self.num_choices
        while low < high:
            limit = (low + high) // 2
            shorter = type(self)(self.seed, limit).go(carriers)
            if type(shorter.error) is type(self.error):
                found, high = shorter, limit
            else:
                low = limit + 1
        return found

    def digest(self) -> str:
        """A digest of the log and of the number of choices: equal for equal runs."""
        text = "\n".join([*self.lines(), str(self.num_choices)])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class FleetRun(Run):
    """One run of a fleet: users, and what becomes of its replicas meanwhile."""

    max_pauses = MAX_FLEET_PAUSES

    def __init__(self, seed: int, limit: int | None = None) -> None:
        super().__init__(seed, limit)
        self._published = Published()

    def _patches(self, faults: RandomFaults) -> list[tuple[Any, str, Any]]:
        return self._published.patches(faults)

    def _scenario(self, scheduler: Scheduler, faults: RandomFaults, transport: SimulatedTransport) -> None:
        run_fleet(scheduler, faults, transport, self._published, self.outcomes, self.ends)


class BrainRun(Run):
    """One run of a fleet whose cores are simple and whose threads are events: much cheaper, much stormier."""

    def go(self, carriers: Carriers | None = None) -> "BrainRun":
        """Carry it out. Raises nothing. It needs no thread."""
        choices = Choices(self.seed, self.limit)
        world = World(choices)
        try:
            with patched(world), _silent():
                self.ends = run_brain(world).reasons
        except Exception as error:
            self.error = error
        self._lines, self.num_choices, self.faults = world.log, choices.num_made, world.faults
        return self


@contextmanager
def _silent() -> Any:
    """The engine's log tells of every injected failure."""
    logger = logging.getLogger("rollout_engine")
    before, logger.disabled = logger.disabled, True
    others = [logging.getLogger(name) for name in ("rollout_engine.core.result_processor",)]
    states = [other.disabled for other in others]
    for other in others:
        other.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
        for other, state in zip(others, states, strict=True):
            other.disabled = state
