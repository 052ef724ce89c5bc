"""The driver of an engine whose group divides the experts of a mixture: its steps are those of all engines."""

from collections import deque
from typing import Any

from rollout_engine.engine.calls import Call
from rollout_engine.execution.executor import InlineExecutor
from rollout_engine.process.weight_server import ServingDriver

_PATIENCE = 0.02
"""Seconds that a step waits for the group before messages are taken again."""


class GroupDriver(ServingDriver):
    """A `ServingDriver` whose steps wait until all engines of the group are ready.

    It holds the group during a step, and as long as a call has pieces left: other engines keep their weights until
    then. A call in pieces begins with a step.
    """

    def __init__(self, core: Any, executor: InlineExecutor, *args: Any, **options: Any) -> None:
        assert executor.group is not None, "others have another driver"
        self._group = executor.group
        self._unbegun: deque[Call] = deque()
        """Calls in pieces of which none has run."""
        super().__init__(core, executor, *args, **options)
        core.stats.rounds = self._group.stats

    def can_progress(self) -> bool:
        if not self._computes():
            self._group.rest()
        return super().can_progress() or bool(self._unbegun)

    def step(self) -> None:
        if not self._computes():
            return super().step()
        if not self._group.enter(_PATIENCE):
            self._end_without_group()
            return
        try:
            super().step()
            if self._unbegun:
                self._run_piece(self._unbegun.popleft())
        finally:
            self._group.leave(keeps=bool(self._pieces), expects=self._computes())

    def _computes(self) -> bool:
        """Whether a step would run the model."""
        has_work = self.core.lifecycle.can_step and self.core.num_in_flight > 0
        return has_work or bool(self._pieces) or bool(self._unbegun)

    def _end_without_group(self) -> None:
        """End the calls that compute no more, whether or not the group becomes ready."""
        unbegun, self._unbegun = self._unbegun, deque()
        begun = [self._pieces.pop() for _ in range(len(self._pieces))]
        for calls, put_back in ((unbegun, self._unbegun.append), (begun, self._pieces.add)):
            for call in calls:
                (self._run_piece if self._is_given_up(call) else put_back)(call)
        if self._waiting:
            self._end_calls()

    def _is_given_up(self, call: Call) -> bool:
        """Whether the next piece of a call ends it without computing: it is cancelled, or late, or has no weights."""
        lifecycle = self.core.lifecycle
        return call.future.cancelled() or call.is_late or lifecycle.dirty or "weights" in lifecycle.asleep

    def begin_pieces(self, call: Call) -> None:
        self._unbegun.append(call)

    def shutdown(self) -> None:
        super().shutdown()
        with self.between_steps():
            while self._unbegun:
                self._run_piece(self._unbegun.popleft())
