"""The seam between the brain and whatever runs the model."""

from typing import Protocol

from rollout_engine.messages import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Runs one step. Its fake is `core.fake_executor.FakeExecutor`."""

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        """Do `work` and return one token per `work.samples` entry.

        An exception fails the sequences scheduled in this step and no others. After one, the next `work.finished`
        names everything this step named or introduced, whether or not it got that far: forgetting an unknown id is
        a no-op.
        """
        ...

    def release_kv(self) -> None:
        """Give the memory of all KV back to the system, contents lost. The next step that writes takes it again."""
        ...

    def release_weights(self, *, forget: bool) -> None:
        """Free what is derived from the weights; with `forget` the weights too. Nothing executes until they are back:
        by `restore_weights`, or, when forgotten, by a complete update.
        """
        ...

    def restore_weights(self) -> None:
        """Derive again what `release_weights(forget=False)` freed."""
        ...
