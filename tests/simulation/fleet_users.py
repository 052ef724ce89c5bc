"""Users of a simulated fleet: those of an engine, and what differs where a call is made on every replica."""

from collections import Counter
from typing import Any

from tests.faults.ledger import Ledger
from tests.simulation.faults import RandomFaults
from tests.simulation.fleet import SimulatedFleet
from tests.simulation.scheduler import Scheduler
from tests.simulation.spelling_worker import NoteBook
from tests.simulation.users import ERRORS, OPERATIONS, Users


class FleetUsers(Users):
    """Users of a fleet's client."""

    def __init__(self, scheduler: Scheduler, fleet: SimulatedFleet, faults: RandomFaults) -> None:
        step_seconds = 0.5  # a slow node's
        super().__init__(scheduler, fleet.frontend, Ledger(), NoteBook(), faults, step_seconds)
        self._fleet = fleet
        self.operations = [*OPERATIONS, *[("health", FleetUsers._health)] * 2]
        fleet.versions_go_back = lambda: self.versions_go_back

    def check_calls(self) -> None:
        """AssertionError where a call ran twice on a core, or on one though it was told that it never would."""
        ran = [Counter(process.engine.worker.notes.numbers) for process in self._fleet.provider.processes]
        for number, fate in self._fates.items():
            counts = [notes[number] for notes in ran if notes[number]]
            assert max(counts, default=0) <= 1, f"call {number} ran twice on one of the replicas"
            if fate == "never":
                assert not counts, f"call {number} ran, though its caller was told that it never would"
            elif fate == "returned":
                assert counts, f"call {number} returned, and never ran"

    def _session(self) -> str | None:
        return self._choices.pick([None, None, "a", "b"])

    def _fate(self, result: Any, number: int) -> str:
        if isinstance(result, list):
            assert result and set(result) == {number}, f"call {number} returned {result}"
            return "returned"
        if "start new thread" in str(result):
            return "unknown"
        return super()._fate(result, number)

    def _name(self, error: Exception) -> str:
        costs = "about to end" in str(error) and self._fleet.client.dead_error is None
        assert not costs, f"a core that ends has cost a request: {error}"
        return super()._name(error)

    def _health(self) -> None:
        try:
            found = self._fleet.client.replicas()
        except ERRORS as error:
            self._note_end("replicas", type(error).__name__)
            return
        self._note_end("replicas", "returned")
        assert [replica.index for replica in found] == list(range(len(found)))
