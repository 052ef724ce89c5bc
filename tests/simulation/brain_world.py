"""The world of the fleet tier without threads: events, choices, failures, and the pipes between clients and cores."""

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from rollout_engine.capacity.events import Events
from tests.simulation.choices import Choices

_DELAYS = (0.001, 0.003, 0.02, 0.1)
KINDS = ("start", "refusal", "weights", "late commit", "half a commit", "told twice")
"""Failures that strike where the fleet's own work passes, each at a rate of its own in every run."""


class World:
    """The event queue of a run, its choices, its failures and its log."""

    def __init__(self, choices: Choices) -> None:
        self.choices, self.events = choices, Events()
        self.is_calm = False
        """Whether nothing fails any more."""
        self.faults: Counter[str] = Counter()
        self.log: list[tuple[float, str, str]] = []
        self.digests = {0: 0}
        """Version -> digest of the newest weights that were sent under it."""
        self.refuted: set[int] = set()
        """Versions of updates that no replica has taken."""
        self.refused: set[int] = set()
        """First sequence ids of requests that a core has refused."""
        self.sent: Callable[[int, int], None] = lambda replica, sequence_id: None
        """Hears of each request that is sent: replica, and first sequence id."""
        self._rates = {kind: choices.pick([0.0, 0.02, 0.1]) for kind in KINDS}
        self._stalls = self._num_digests = 0

    def monotonic(self) -> float:
        """Seconds on the machine's clock, which stalls and jumps."""
        return self.events.now + self._stalls

    def stall(self, seconds: int) -> None:
        """Let the clock jump."""
        self._stalls += seconds

    def later(self, seconds: float, event: Callable[..., object], *arguments: Any) -> None:
        """Plan an event."""
        self.events.plan(self.events.now + seconds, event, *arguments)

    def delayed(self, event: Callable[..., object], *arguments: Any) -> None:
        """Plan an event after a delay that the seed chooses."""
        self.later(self.choices.pick(_DELAYS), event, *arguments)

    def told(self, event: Callable[..., object], *arguments: Any) -> None:
        """Plan a notice: late, and perhaps twice."""
        self.later(self.choices.pick((0.0, 0.01, 0.3, 2.0, 10.0)), event, *arguments)
        if self.strikes("told twice"):
            self.later(self.choices.pick((0.0, 0.3, 2.0, 10.0)), event, *arguments)

    def strikes(self, kind: str) -> bool:
        """Whether a failure of a kind strikes here."""
        if self.is_calm or not self.choices.chance(self._rates[kind]):
            return False
        self.count(kind)
        return True

    def count(self, what: str, where: object = "") -> None:
        """Count a failure."""
        self.faults[what] += 1
        self.note(f"fault: {what} {where}")

    def note(self, event: str) -> None:
        """Add a line to the log."""
        self.log.append((self.events.now, "", event))

    def new_weights(self, version: int) -> int:
        """The digest of weights that no core has."""
        self._num_digests += 1
        self.refuted.discard(version)
        self.digests[version] = self._num_digests
        return self._num_digests


class Pipe:
    """One way of a connection. Messages arrive in order, some time after they were sent."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._messages: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.held_until = 0.0

    @property
    def is_held(self) -> bool:
        """Whether nothing arrives now."""
        return self.held_until > self._world.events.now

    def send(self, arrive: Callable[..., object], *arguments: Any) -> None:
        """Call `arrive` at the other end."""
        self._messages.append((arrive, arguments))
        self._world.delayed(self._arrive)

    def flush(self) -> None:
        """Let all that is on its way arrive."""
        while self._messages:
            arrive, arguments = self._messages.popleft()
            arrive(*arguments)

    def lose(self) -> None:
        """Let nothing arrive of what is on its way."""
        self._messages.clear()

    def _arrive(self) -> None:
        if self.is_held:
            self._world.events.plan(self.held_until, self._arrive)
        elif self._messages:  # else it was flushed, or lost
            arrive, arguments = self._messages.popleft()
            arrive(*arguments)


class Call:
    """A call on a core: `done` hears its result, or its error, once."""

    def __init__(self, done: Callable[[Any], None]) -> None:
        self._done: Callable[[Any], None] | None = done

    def end(self, result: Any) -> None:
        """Tell the result, unless the call has ended."""
        done, self._done = self._done, None
        if done is not None:
            done(result)
