"""Weight transfers for TRL's `AsyncGRPOTrainer`, which calls them `weight_transfer` (`WeightTransferProtocol`).

TRL wraps each transfer in `pause()` and `resume()`. Here these do nothing: the engine stages and checks new weights
next to the old ones and changes over between two steps, wholly or not at all, so it keeps generating meanwhile, and
every token carries the version of the weights that sampled it. A transfer that fails leaves the old weights serving.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from rollout_engine.rollouts.policy import RolloutPolicy
from sync.store import publish

Tensors = Iterator[tuple[str, Tensor]]


class _Transfer:
    """The methods that need do nothing."""

    def init_weight_transfer(self) -> None:
        """Called once, before the first transfer."""

    def pause(self) -> None:
        """Called before each transfer. Generation continues."""

    def resume(self) -> None:
        """Called after each transfer that succeeded."""

    def destroy(self) -> None:
        """Called when training ends. Nothing was opened."""


class PolicyWeightTransfer(_Transfer):
    """Pushes weights into a policy of this process, whose engine may be anywhere.

        AsyncGRPOTrainer(..., weight_transfer=PolicyWeightTransfer(policy))

    Its versions are those of the policy: each transfer is one more.
    """

    def __init__(self, policy: RolloutPolicy, *, partial: bool = False) -> None:
        """`partial`: for models with frozen parameters, which TRL does not send; the engine keeps its own of them."""
        self._policy, self._partial = policy, partial

    def send_weights(self, iterator: Tensors) -> None:
        """Replace the engine's weights by those of `iterator`. Raises the errors of `RolloutPolicy.update_weights`."""
        self._policy.update_weights(iterator, partial=self._partial)


class StoreWeightTransfer(_Transfer):
    """Publishes weights in a directory (`sync.publish`), which engines of other processes read.

    AsyncGRPOTrainer(..., weight_transfer=StoreWeightTransfer("runs/weights", announce=tell_my_engines))
    """

    def __init__(
        self, directory: str | os.PathLike[str], announce: Callable[[Path, int], object], *, first_version: int = 1
    ) -> None:
        """
        Args:
            directory: made if it does not exist.
            announce: called with the directory and its new version once that is complete; it should return when the
                engines have taken it, as `update_weights(directory)` does.
            first_version: of the first transfer; each is one more. Higher than the directory's and the engines' own.
        """
        self._directory, self._announce, self._next_version = Path(directory), announce, first_version

    def send_weights(self, iterator: Tensors) -> None:
        """Publish the weights of `iterator` and announce them. Raises the errors of `sync.publish` and `announce`.

        Before the announcement nothing has changed for an engine, and a transfer that failed may be repeated.
        """
        publish(self._directory, iterator, self._next_version)
        self._next_version += 1
        self._announce(self._directory, self._next_version - 1)
