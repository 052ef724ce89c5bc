"""Failures of the machine and of users' code, at points that the program passes, as a seed decides."""

import errno
from collections import Counter
from collections.abc import Callable

from rollout_engine.base.errors import EngineDeadError
from tests.simulation.scheduler import Scheduler


def _no_memory() -> Exception:
    return MemoryError("no memory is left")


def _no_thread() -> Exception:
    return RuntimeError("can't start new thread")


def _system(number: int) -> Callable[[], Exception]:
    return lambda: OSError(number, errno.errorcode[number])


POINTS: dict[str, tuple[str, Callable[[], Exception] | None]] = {
    "step": ("allocation", _no_memory),
    "score": ("allocation", _no_memory),
    "shadow": ("allocation", _no_memory),
    "commit": ("allocation", _no_memory),
    "wake": ("allocation", _no_memory),
    "thread": ("threads", _no_thread),
    "connect": ("descriptors", _system(errno.EMFILE)),
    "offer": ("disk", _system(errno.ENOSPC)),
    "read": ("disk", _system(errno.EIO)),
    "row": ("plug-ins", None),
    "call": ("plug-ins", None),
    "start": ("starts", lambda: EngineDeadError("the replica did not start")),
}
"""Point -> the kind of failure that strikes there, and the error that it raises; None: `reach` returns True."""
_OFTEN = {"wake": 4.0, "commit": 2.0, "connect": 4.0}
"""Points that few runs pass, and how much more often failures strike there."""
KINDS = ("allocation", "threads", "descriptors", "disk", "plug-ins", "clock", "starts")


class RandomFaults:
    """The failures of one run: a few kinds, each as often as the seed has it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        choices = scheduler.choices
        self._rates = {kind: choices.pick([0.0, 0.0, 0.03, 0.2]) for kind in KINDS}
        self.is_on = True
        self.counts: Counter[str] = Counter()
        """Points -> how often a failure struck there."""

    def reach(self, point: str) -> bool:
        """The program passes a point: other tasks may run, and a failure may strike."""
        self._scheduler.pause()
        if not self.is_on:
            return False
        self._move_clocks()
        kind, make_error = POINTS[point]
        if not self._scheduler.choices.chance(self._rates[kind] * _OFTEN.get(point, 1.0)):
            return False
        self.counts[point] += 1
        self._scheduler.note(f"fault: {point}")
        if make_error is not None:
            raise make_error()
        return True

    def _move_clocks(self) -> None:
        choices, clock = self._scheduler.choices, self._scheduler.clock
        if choices.chance(self._rates["clock"] / 4):
            seconds = choices.pick([0.01, 0.3, 3.0, 30.0, 4000.0])
            self.counts["clock"] += 1
            self._scheduler.note(f"fault: the clock stalls for {seconds:g} s")
            clock.advance(seconds)
            clock.set_wall(choices.pick([0.0, -86400.0, 86400.0]))
