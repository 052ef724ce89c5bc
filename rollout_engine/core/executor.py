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
