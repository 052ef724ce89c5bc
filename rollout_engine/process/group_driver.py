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

    def can_progress(self) -> bool:
        if not self._computes():
            self._group.rest()
        return super().can_progress() or bool(self._unbegun)

    def step(self) -> None:
        if not self._computes():
            return super().step()
        if not self._group.enter(_PATIENCE):
            if self._waiting:
                self._end_calls()
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

    def begin_pieces(self, call: Call) -> None:
        self._unbegun.append(call)

    def shutdown(self) -> None:
        super().shutdown()
        with self.between_steps():
            while self._unbegun:
                self._run_piece(self._unbegun.popleft())
