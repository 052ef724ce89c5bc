"""What becomes of a fleet's replicas while it is used: killed, hung, cut off, slow, more, fewer."""

from collections.abc import Callable

from rollout_engine.base.errors import RolloutEngineError
from tests.simulation.core_process import SimulatedCoreProcess
from tests.simulation.faults import RandomFaults
from tests.simulation.fleet import HANG_SECONDS, SimulatedFleet
from tests.simulation.scheduler import Scheduler

_WAITS = (0.0, 0.001, 0.01, 0.05, 0.2, 1.0)
"""Seconds between two of them."""
_PROVEN_SECONDS = 70.0
"""How long the machine stands still after some, so that a fleet does not give its replicas up."""


class Disasters:
    """A task that does one thing after the other to a fleet. `counts` of its faults: what -> how often."""

    def __init__(self, scheduler: Scheduler, faults: RandomFaults, fleet: SimulatedFleet) -> None:
        self._scheduler, self._choices, self._faults, self._fleet = scheduler, scheduler.choices, faults, fleet
        self._num_busy = 0

    @property
    def are_over(self) -> bool:
        """Whether the task has ended, and whatever it began."""
        return not self._num_busy

    def start(self, count: int) -> None:
        """Start the task."""
        self._spawn("disasters", lambda: self._run(count))

    def _spawn(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                self._num_busy -= 1

        self._num_busy += 1
        self._scheduler.spawn(name, run)

    def _run(self, count: int) -> None:
        for number in range(count):
            self._scheduler.sleep(self._choices.pick(_WAITS))
            if not self._faults.is_on or self._choices.are_over or self._fleet.client.dead_error is not None:
                return
            what, strike = self._choices.pick(_DISASTERS)
            alive = self._fleet.provider.alive
            if alive:
                process = self._choices.pick(alive)
                self._count(what, process)
                strike(self, process)
            if number % 3 == 2:
                self._stand_still()

    def _count(self, what: str, process: SimulatedCoreProcess) -> None:
        self._faults.counts[what] += 1
        self._scheduler.note(f"{what}: {process.group}")

    def _stand_still(self) -> None:
        self._faults.counts["clock"] += 1
        self._scheduler.note("the machine stands still")
        self._scheduler.clock.advance(_PROVEN_SECONDS)

    def _kill(self, process: SimulatedCoreProcess) -> None:
        process.kill()

    def _terminate(self, process: SimulatedCoreProcess) -> None:
        process.terminate()

    def _hang(self, process: SimulatedCoreProcess) -> None:
        self._scheduler.freeze(process.group, self._choices.pick([2 * HANG_SECONDS, 0.3, 0.7 * HANG_SECONDS]))

    def _slow(self, process: SimulatedCoreProcess) -> None:
        process.engine.worker.step_seconds = self._choices.pick([0.05, 0.5, 0.0])

    def _cut(self, process: SimulatedCoreProcess) -> None:
        for link in self._fleet.provider.links_of(process):
            link.cut()

    def _partition(self, process: SimulatedCoreProcess) -> None:
        """Hold what goes to a core, what comes from it, or both; for longer than a client waits, it is as for ever."""
        until = self._scheduler.clock.now + self._choices.pick([2 * HANG_SECONDS, 0.1, 1.0, 0.7 * HANG_SECONDS])
        ways = self._choices.pick([(True, True), (True, False), (False, True)])
        for link in self._fleet.provider.links_of(process):
            for pipe, is_held in zip((link.to_core, link.to_client), ways, strict=True):
                if is_held:
                    pipe.hold(until)

    def _kill_in_update(self, process: SimulatedCoreProcess) -> None:
        """Kill a core in the middle of an update, if one comes."""
        self._await_update(process)
        process.kill()

    def _hang_in_update(self, process: SimulatedCoreProcess) -> None:
        self._await_update(process)
        self._hang(process)

    def _await_update(self, process: SimulatedCoreProcess) -> None:
        updater, deadline = process.engine.worker.updater, self._scheduler.clock.now + 2.0
        self._scheduler.wait(lambda: updater.is_open or process.status is not None, deadline, "an update")
        for _ in range(self._choices.below(20)):
            self._scheduler.pause()

    def _scale(self, _: SimulatedCoreProcess) -> None:
        count = 1 + self._choices.below(4)
        try:
            self._fleet.client.scale(count)
        except RolloutEngineError as error:
            self._scheduler.note(f"scale({count}): {type(error).__name__}")

    def _restart(self, _: SimulatedCoreProcess) -> None:
        self._spawn("restart", self._restart_all)

    def _restart_all(self) -> None:
        try:
            self._fleet.client.restart()
            self._scheduler.note("restart: returned")
        except RolloutEngineError as error:
            self._scheduler.note(f"restart: {type(error).__name__}")


_DISASTERS: list[tuple[str, Callable[[Disasters, SimulatedCoreProcess], None]]] = [
    *[("kill", Disasters._kill)] * 4,
    *[("terminate", Disasters._terminate)] * 1,
    *[("hang", Disasters._hang)] * 3,
    *[("slow node", Disasters._slow)] * 2,
    *[("broken connection", Disasters._cut)] * 2,
    *[("partition", Disasters._partition)] * 4,
    *[("kill in update", Disasters._kill_in_update)] * 2,
    *[("hang in update", Disasters._hang_in_update)] * 1,
    *[("scale", Disasters._scale)] * 3,
    *[("restart", Disasters._restart)] * 2,
]
