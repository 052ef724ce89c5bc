"""The seam between the brain and whatever runs the model."""

from collections.abc import Callable
from typing import Protocol

from rollout_engine.messages import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Runs steps in order. All else is asked only while none is in flight.

    Its fake is `core.fake_executor.FakeExecutor`.
    """

    def submit(self, work: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Do `work` after all that was submitted before; returns what waits for its result, which is called once.

        The result has one token per `work.samples` entry. Work may come while that before it is still running: a
        sequence goes on from the token that was drawn for it last, whether or not anybody has asked for it yet.

        The same goes for a token that could not be drawn: what is computed on from it is told to nobody.

        An exception in place of the result fails the sequences scheduled in this step; nothing runs when it is raised.
        Nobody asks for the results of steps behind it, which may have run or not. The next `work.finished` names
        everything that any of these steps named or introduced: forgetting an unknown id is a no-op.
        """
        ...

    def release_kv(self) -> None:
        """Give the memory of all KV back to the system, contents lost. The next step that writes takes it again."""
        ...

    def release_weights(self, *, forget: bool) -> None:
        """Free what is derived from the weights, or move them to where nothing computes; `forget` them altogether.
        Nothing executes until they are back: by `restore_weights`, or, when forgotten, by a complete update.
        """
        ...

    def restore_weights(self) -> None:
        """Have again what `release_weights(forget=False)` freed; where that raises, it is as before."""
        ...
