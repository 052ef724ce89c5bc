"""A simulated replica: its engine's runs of steps on the simulation's clock."""

from array import array
from collections.abc import Callable

from rollout_engine.capacity.engine import SimulatedEngine
from rollout_engine.capacity.events import Events
from rollout_engine.capacity.sequences import EngineRequest, EngineSequence


class Timeline:
    """Tokens over time: each run's begin, end and number of tokens."""

    def __init__(self) -> None:
        self.begins, self.ends, self.tokens = array("d"), array("d"), array("d")

    def add(self, begin: float, end: float, num_tokens: int) -> None:
        """Add a run."""
        self.begins.append(begin)
        self.ends.append(end)
        self.tokens.append(num_tokens)


class SimulatedReplica:
    """One engine that computes whenever it can. It calls `ended` with ended sequences, `idle` after the last one."""

    def __init__(
        self,
        index: int,
        engine: SimulatedEngine,
        events: Events,
        timeline: Timeline,
        ended: Callable[["SimulatedReplica", list[EngineSequence]], None],
        idle: Callable[[], None],
    ) -> None:
        self.index, self.engine = index, engine
        self.is_draining = False
        """Arriving requests are held until `resume`."""
        self._held: list[EngineRequest] = []
        self._events, self._timeline, self._ended, self._idle = events, timeline, ended, idle
        self._begun_at = self._stalled_until = 0.0
        self._num_steps = 0
        """Steps of the run in progress, as far as it is to go."""
        self._plan = 0
        """Number of the newest planned end of a run; older ones are void."""
        self._is_waking = False
        self._commit: tuple[int, bool, float, Callable[[], None]] | None = None

    def add(self, request: EngineRequest) -> None:
        """Take a request; it joins the batch with the next step."""
        if self.is_draining:
            self._held.append(request)
            return
        self.engine.add(request)
        if self.engine.run is None:
            self._wake()
        elif not self.engine.is_full:
            self._cut()

    def resume(self) -> None:
        """Take the requests that were held."""
        self.is_draining = False
        held, self._held = self._held, []
        for request in held:
            self.add(request)

    def list_held(self) -> list[EngineSequence]:
        """Sequences of requests that are held."""
        return [sequence for request in self._held for sequence in request.sequences]

    def commit(self, version: int, seconds: float, done: Callable[[], None], *, recompute: bool) -> None:
        """Take the weights of a version after the step in progress, and stall for `seconds`; then call `done`."""
        self._commit = version, recompute, seconds, done
        if self.engine.run is None:
            self._carry_out_commit()
        else:
            self._cut()

    def stop(self) -> None:
        """Compute nothing any more. The step in progress is lost."""
        if self.engine.run is not None:
            self._finish(self.engine.run.num_over(self._events.now - self._begun_at))
        self._plan += 1
        self._stalled_until = float("inf")

    def abort(self, sequence_ids: list[int]) -> None:
        """End sequences. The step in progress is lost."""
        if self.engine.run is not None:
            self._finish(self.engine.run.num_over(self._events.now - self._begun_at))
            self._plan += 1
        wanted = set(sequence_ids)
        for sequence in self.engine.sequences():
            if sequence.sequence_id in wanted:
                self.engine.abort(sequence)
        for request in self._held:
            request.sequences = [each for each in request.sequences if each.sequence_id not in wanted]
        self._held = [request for request in self._held if request.sequences]
        self._wake()

    def _wake(self) -> None:
        if not self._is_waking and self._stalled_until != float("inf"):
            self._is_waking = True
            self._events.plan(max(self._events.now, self._stalled_until), self._finish_waking)

    def _finish_waking(self) -> None:
        self._is_waking = False
        if self._events.now < self._stalled_until:
            self._wake()
        elif self.engine.run is None:
            self._begin()

    def _begin(self) -> None:
        run = self.engine.begin()
        if run is None:
            self._idle()
            return
        self._begun_at = self._events.now
        self._plan_end(run.num_steps)

    def _plan_end(self, num_steps: int) -> None:
        assert self.engine.run is not None
        self._plan, self._num_steps = self._plan + 1, num_steps
        at = self._begun_at + self.engine.run.seconds_of(num_steps)
        self._events.plan(max(at, self._events.now), self._finish_steps, self._plan, num_steps)

    def _cut(self) -> None:
        """Let the run end with the step in progress."""
        assert self.engine.run is not None
        num_steps = self.engine.run.num_begun(self._events.now - self._begun_at)
        if num_steps < self._num_steps:
            self._plan_end(num_steps)

    def _finish_steps(self, plan: int, num_steps: int) -> None:
        if plan != self._plan:
            return
        self._finish(num_steps)
        if self._commit is not None:
            self._carry_out_commit()
        else:
            self._begin()

    def _finish(self, num_steps: int) -> None:
        engine = self.engine
        before = engine.counts.num_sampled
        engine.finish(num_steps)
        if (num_sampled := engine.counts.num_sampled - before) > 0:
            self._timeline.add(self._begun_at, self._events.now, num_sampled)
        if engine.ended:
            ended, engine.ended = engine.ended, []
            self._ended(self, ended)

    def _carry_out_commit(self) -> None:
        assert self._commit is not None
        version, recompute, seconds, done = self._commit
        self._commit = None
        self.engine.commit(version, recompute=recompute)
        self._stalled_until = self._events.now + seconds
        self._events.plan(self._stalled_until, done)
        self._wake()
