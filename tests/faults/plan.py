"""Faults at named points: the n-th time that something happens, strike."""

from collections import Counter
from collections.abc import Callable


class FaultPlan:
    """What is to happen, and when. Runs say which points they pass; the shipped code knows nothing of it.

    >>> plan = FaultPlan()
    >>> plan.at("output", 40, lambda: os.kill(pid, signal.SIGKILL))
    >>> plan.reached("output")
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Point -> how often it was passed."""
        self._strikes: dict[tuple[str, int], Callable[[], None]] = {}

    def at(self, point: str, count: int, strike: Callable[[], None]) -> None:
        """Call `strike` when `point` is passed for the `count`-th time, from 1."""
        self._strikes[point, count] = strike

    def reached(self, point: str) -> None:
        """`point` is passed."""
        self.counts[point] += 1
        strike = self._strikes.pop((point, self.counts[point]), None)
        if strike is not None:
            strike()

    def assert_all_struck(self) -> None:
        """A run whose faults never came has shown nothing."""
        assert not self._strikes, f"never reached: {sorted(self._strikes)}; passed: {dict(self.counts)}"
