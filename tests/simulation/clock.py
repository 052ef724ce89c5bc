"""The clocks of a simulated run: nothing but the simulation moves them."""


class SimulatedClock:
    """A monotonic clock, which may stall forward, and a wall clock, which may jump both ways."""

    _TICK_SECONDS = 2e-5

    def __init__(self) -> None:
        self.now = 1000.0
        """Seconds on the monotonic clock."""
        self._wall_offset = 1.7e9

    @property
    def wall(self) -> float:
        """Seconds on the wall clock."""
        return self.now + self._wall_offset

    def tick(self) -> None:
        """Let a moment pass: code takes time."""
        self.now += self._TICK_SECONDS

    def advance(self, seconds: float) -> None:
        """Let time pass that nobody uses: a machine that was suspended, or has nothing to do."""
        assert seconds >= 0, "a monotonic clock never goes back"
        self.now += seconds

    def set_wall(self, seconds: float) -> None:
        """Move the wall clock by `seconds`, back if negative; the monotonic clock does not notice."""
        self._wall_offset += seconds
