"""The seam between the core and whatever runs the model."""

from collections.abc import Callable
from typing import Protocol

from rollout_engine.base.messages import KVSave, ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Runs steps in order. Its other methods are called only while no step is in flight.

    Its fake is `core.fake_executor.FakeExecutor`.
    """

    def submit(self, work: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Run a step after all steps submitted before; return a function, called once, that waits for the result.

        The result has one token per `work.samples` entry. A step may be submitted while the one before is running: its
        sequences continue from the tokens sampled there, even if that result was not asked for yet. Results computed
        from a token that could not be sampled are dropped.

        An exception in place of the result fails the sequences scheduled in this step; nothing runs when it is raised.
        A `SequenceError` fails the request of its sequence alone: the others are computed again in later steps.
        The results of later steps are not asked for: they may have run or not. The next `work.finished_sequence_ids`
        names all sequences that any of these steps named or introduced: releasing an unknown id is a no-op.
        """
        ...

    def draft(self, work: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step of the draft model, whose sequences and blocks are its own. An error of it fails no request."""
        ...

    def save_kv(self, saves: list[KVSave]) -> None:
        """Hand blocks of KV and states to the KV connector at once, as a step does by its `kv_saves`."""
        ...

    def release_kv(self) -> None:
        """Give the memory of all KV back to the system, contents lost. The next step that writes takes it again."""
        ...

    def release_weights(self, *, forget: bool) -> None:
        """Free copies derived from the weights, or move the weights to host memory; or `forget` them.

        Nothing executes until they are back: by `restore_weights`, or, when forgotten, by a complete update.
        """
        ...

    def restore_weights(self) -> None:
        """Undo `release_weights(forget=False)`. If that raises, the weights stay released."""
        ...
