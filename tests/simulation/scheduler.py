"""Runs the threads of a program one at a time, in an order that a seed decides.

    task ── pause, or wait until something is so ──> choose the next task ──> it goes on from where it was
                                                     none can run: the clock goes to the next deadline,
                                                     or else it is a deadlock, and the run fails

Every task has a thread of the system, because the program's code blocks where it likes, but only one runs at a time:
the others wait for the baton.
"""

import contextvars
import heapq
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tests.simulation.choices import Choices
from tests.simulation.clock import SimulatedClock

MAX_PAUSES = 40_000
"""A run of one engine that has not ended by then never does."""
CARRIER_NAME = "simulated"
"""Name of the system's threads that carry tasks."""
_MAX_STOPS = 100
"""How often a task may go on after it was told to stop."""


class Stopped(BaseException):
    """Raised in the tasks of a run that is over, and of a process that was killed, wherever they wait."""


class SimulationFailed(AssertionError):
    """The program did in a simulated run what it never may."""


class Task:
    """A thread of the program under simulation."""

    def __init__(self, number: int, name: str, group: str, carrier: "_Carrier") -> None:
        self.number, self.name, self.group, self.carrier = number, name, group, carrier
        """`group`: the process that it belongs to."""
        self.thread: Any = None
        """The program's own object for it; None where the simulation started it."""
        self.is_done = self.is_stopped = False
        self.is_ready: Callable[[], bool] | None = None
        """What it waits for; None: nothing."""
        self.deadline: float | None = None
        self.waits_for = ""
        self.frozen_until = 0.0
        self.last_run = 0
        self.num_stops = 0

    def can_run(self, now: float) -> bool:
        """Whether what it waits for is so, or its deadline is over."""
        if self.is_stopped:
            return True
        if self.frozen_until > now:
            return False
        return self.is_ready is None or (self.deadline is not None and self.deadline <= now) or self.is_ready()


class Scheduler:
    """Chooses which task runs. Its methods are called by the task that runs."""

    def __init__(
        self,
        choices: Choices,
        clock: SimulatedClock,
        carriers: "Carriers",
        *,
        restlessness: float = 0.2,
        max_pauses: int = MAX_PAUSES,
    ) -> None:
        """`restlessness`: the chance of another task's turn wherever one may lose its own."""
        self.choices, self.clock = choices, clock
        self.log: list[tuple[float, str, str]] = []
        """(seconds, task, what happened)."""
        self.current: Task
        self.error: BaseException | None = None
        """The first failure of the run."""
        self.num_pauses, self._max_pauses = 0, max_pauses
        self._restlessness, self._carriers = restlessness, carriers
        self._tasks: list[Task] = []
        self._num_tasks = self._num_turns = 0
        self._alarms: list[float] = []
        """Times at which something that tasks wait for becomes so by itself."""
        self._over = threading.Lock()
        self._over.acquire()

    def run(self, main: Callable[[], object]) -> None:
        """Run `main` and every task that it starts. Raises the first error; all tasks must end before `main` does."""
        self._main = self.spawn("main", main)
        self.current = self._main
        self._main.carrier.gate.release()
        self._over.acquire()
        if self.error is not None:
            raise self.error

    def spawn(self, name: str, work: Callable[[], object], group: str | None = None) -> Task:
        """Start a task; it runs when it is chosen. `group`: default that of the task that starts it."""
        self._num_tasks += 1
        carrier = self._carriers.take()
        task = Task(self._num_tasks, name, group or (self.current.group if self._tasks else "main"), carrier)
        carrier.work = partial(self._carry, task, work)
        self._tasks.append(task)
        return task

    def pause(self) -> None:
        """Maybe let another task run: called wherever threads may lose their turn."""
        self._begin_pause()
        if self.choices.chance(self._restlessness):
            self._hand_over()

    def wait(self, is_ready: Callable[[], bool], deadline: float | None = None, what: str = "") -> bool:
        """Let others run until `is_ready()`, or the clock is at `deadline`; returns whether it is ready."""
        self._begin_pause()
        if is_ready() and not self.choices.chance(self._restlessness):
            return True
        task = self.current
        task.is_ready, task.deadline, task.waits_for = is_ready, deadline, what
        try:
            self._hand_over()
        finally:
            task.is_ready, task.deadline = None, None
        return is_ready()

    def sleep(self, seconds: float) -> None:
        """Let others run for `seconds`."""
        self.wait(lambda: False, self.clock.now + max(seconds, 0.0), "sleep")

    def add_alarm(self, at: float) -> None:
        """Look again at what tasks wait for when the clock is at `at`."""
        heapq.heappush(self._alarms, at)

    def freeze(self, group: str, seconds: float) -> None:
        """Let no task of a process run for `seconds`."""
        for task in self._of(group):
            task.frozen_until = self.clock.now + seconds

    def kill(self, group: str) -> None:
        """End the tasks of a process, which is not the current one, wherever they are."""
        for task in self._of(group):
            task.is_stopped = True

    @property
    def num_others(self) -> int:
        """Tasks beside the current one."""
        return len(self._tasks) - 1

    def note(self, event: str) -> None:
        """Add a line to the log."""
        self.log.append((self.clock.now, self.current.name, event))

    def fail(self, error: BaseException) -> None:
        """End the run with an error; the first one counts."""
        if self.error is None:
            self.error = error
        for task in self._tasks:
            task.is_stopped = True

    def _of(self, group: str) -> Iterable[Task]:
        return [task for task in self._tasks if task.group == group]

    def _begin_pause(self) -> None:
        task = self.current
        if task.is_stopped:
            self._stop(task)
        self.clock.tick()
        self.num_pauses += 1
        if self.num_pauses > self._max_pauses:
            self.fail(SimulationFailed(f"the run does not end: {self._describe_tasks()}"))
            raise Stopped

    def _stop(self, task: Task) -> None:
        task.num_stops += 1
        if task.num_stops > _MAX_STOPS:  # it will not hear: leave its thread behind
            task.carrier.gate = threading.Lock()
            self._end(task).release()
            threading.Event().wait()
        raise Stopped

    def _hand_over(self) -> None:
        task, following = self.current, self._choose()
        if following is not task:
            self._make_current(following)
            following.carrier.gate.release()
            task.carrier.gate.acquire()
        if task.is_stopped:
            raise Stopped

    def _make_current(self, task: Task) -> None:
        self._num_turns += 1
        task.last_run = self._num_turns
        self.current = task

    def _choose(self) -> Task:
        """The next task; the plain choice is the one that has waited longest for its turn."""
        while True:
            now = self.clock.now
            runnable = [task for task in self._tasks if task.can_run(now)]
            if runnable:
                runnable.sort(key=lambda task: task.last_run)
                return self.choices.pick(runnable)
            self._pass_time(now)

    def _pass_time(self, now: float) -> None:
        times = [task.frozen_until for task in self._tasks if task.frozen_until > now]
        times += [task.deadline for task in self._tasks if task.deadline is not None and task.frozen_until <= now]
        while self._alarms and self._alarms[0] <= now:
            heapq.heappop(self._alarms)
        times += self._alarms[:1]
        if times:
            self.clock.advance(min(times) - now)
        else:
            self.fail(SimulationFailed(f"deadlock: {self._describe_tasks()}"))

    def _describe_tasks(self) -> str:
        return "; ".join(f"{task.name} waits for {task.waits_for or 'its turn'}" for task in self._tasks)

    def _carry(self, task: Task, work: Callable[[], object]) -> Any:
        """Run a task to its end; returns the gate of what runs next."""
        try:
            if not task.is_stopped:
                contextvars.Context().run(work)
        except Stopped:
            pass
        except BaseException as error:
            if not task.is_stopped:
                self.fail(error)
        return self._end(task)

    def _end(self, task: Task) -> Any:
        task.is_done = True
        self._tasks.remove(task)
        if task is self._main and self._tasks and self.error is None:
            self.fail(SimulationFailed(f"tasks are left at the end: {self._describe_tasks()}"))
        if not self._tasks:
            return self._over
        self._make_current(self._choose())
        return self.current.carrier.gate


class _Carrier:
    """A thread of the system that runs one task after the other, each when its gate opens."""

    def __init__(self, idle: "list[_Carrier]") -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.work: Callable[[], Any] | None = None
        """Runs a task; returns the gate of what runs next."""
        self._idle = idle
        self.thread = threading.Thread(target=self._run, name=CARRIER_NAME, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            self.gate.acquire()
            if self.work is None:
                return
            following = self.work()
            self.work = None
            self._idle.append(self)
            following.release()


class Carriers:
    """Threads of the system, kept from run to run: starting one takes longer than most tasks."""

    def __init__(self) -> None:
        self._idle: list[_Carrier] = []

    def take(self) -> _Carrier:
        """A thread that waits for its next task."""
        return self._idle.pop() if self._idle else _Carrier(self._idle)

    def close(self) -> None:
        """End the threads that no task uses."""
        while self._idle:
            carrier = self._idle.pop()
            carrier.gate.release()
            carrier.thread.join()

    def __enter__(self) -> "Carriers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
