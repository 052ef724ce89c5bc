"""One callback a training step: its statistics are written to a file next to the rollouts, and to trackers."""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tensordict import TensorDictBase
from torch import Tensor

from rollout_engine.base.errors import RequestError
from rollout_engine.base.structs import plain
from rollout_engine.faces.verb_methods import BlockingVerbs
from rollout_engine.looking.statistics import EngineRates, Numbers, batch_statistics
from rollout_engine.looking.steps_file import NAME, LoggedStep, StepsFile
from rollout_engine.looking.trackers import Tracker, as_tracker

logger = logging.getLogger("rollout_engine")


class StepLog:
    """Logs the steps of a training into a directory, which `rollout-engine watch` follows.

        with StepLog("runs/grpo", policy, trackers=["tensorboard", "wandb"]) as steps:
            for prompts in dataset:
                batch = policy.rollout(prompts, params, log_to=steps.rollouts)
                logprobs, loss = train(batch)
                policy.update_weights(trainer)
                steps(batch, trainer_logprobs=logprobs, loss=loss)

    A tracker that fails is left out from then on, with a warning: the training continues.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        policy: BlockingVerbs | None = None,
        *,
        trackers: Sequence[str | Tracker] = (),
    ) -> None:
        """`policy`: whose engine is measured too; None: only batches are.

        `trackers`: names ("tensorboard", "wandb", "trackio", "mlflow"), or objects as
        `rollout_engine.looking.trackers` has them. Steps are counted on from those that the directory has. Raises
        `RequestError` for a directory that cannot be written, `ConfigError` for a tracker that cannot be made.
        """
        self.directory = Path(directory)
        self.rollouts = self.directory / "rollouts.jsonl"
        """File for `log_to`."""
        self._file = StepsFile(self.directory / NAME)
        self._policy = policy
        given = [trackers] if isinstance(trackers, str) else trackers
        self._trackers = [as_tracker(each, self.directory) for each in given]
        self._rates = None if policy is None else EngineRates(policy.get_metrics)

    def __call__(
        self,
        batch: TensorDictBase | None = None,
        *,
        trainer_logprobs: Tensor | None = None,
        step: int | None = None,
        **numbers: Any,
    ) -> Numbers:
        """Log one step, and return its numbers by their names (`rollout_engine.looking.statistics`).

        `trainer_logprobs`: for the KL divergence to the trainer, see `batch_statistics`. `step`: its number; None: one
        more than the last. `numbers`: numbers of your own, such as loss=0.1; tensors of one element will do. Raises
        `RequestError` for values that are no numbers.
        """
        number = self._file.next_step if step is None else step
        if number < self._file.next_step:
            raise RequestError.for_field("step", step, f"at least {self._file.next_step}: steps ascend")
        own = {name: _as_number(name, value) for name, value in numbers.items()}
        found: Numbers = {}
        if batch is not None:
            version = None if self._policy is None else self._policy.policy_version
            found = batch_statistics(batch, live_version=version, trainer_logprobs=trainer_logprobs)
        if self._rates is not None:
            found |= self._rates()
            if "tokens" in found:
                found["tokens_per_second"] = found["tokens"] / max(found["seconds"], 1e-9)
        found |= own
        self._file.append(LoggedStep(number, time.time(), dict(found)))
        self._tell(number, found)
        return found

    def close(self) -> None:
        """End the runs of the trackers. Calling it again is a no-op."""
        for tracker in self._take_trackers():
            try:
                tracker.close()
            except Exception:
                logger.warning("The tracker %s failed to close.", type(tracker).__name__, exc_info=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_trackers(self) -> list[Tracker]:
        taken, self._trackers = self._trackers, []
        return taken

    def _tell(self, number: int, numbers: Numbers) -> None:
        for tracker in list(self._trackers):
            try:
                tracker.log(number, numbers)
            except Exception:
                self._trackers.remove(tracker)
                name = type(tracker).__name__
                logger.warning("The tracker %s failed at step %d; it gets no more.", name, number, exc_info=True)


def _as_number(name: str, value: Any) -> float:
    found = plain(value.detach() if isinstance(value, Tensor) else value)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise RequestError.for_field(name, value, "a number, or a tensor of one without dimensions")
    return float(found)
