"""A model that sleeps gives its memory back to the system; its tensors keep their addresses."""

from collections.abc import Iterable

from torch import Tensor, nn

from rollout_engine.kernels.memory import give_back, trim
from rollout_engine.model.fusion import repack, unpack


def release_derived(module: nn.Module) -> None:
    """Free every packed copy of `module`'s weights."""
    unpack(module)
    trim()


def restore_derived(module: nn.Module) -> None:
    """Pack the weights again."""
    repack(module)


def release_weights(weights: Iterable[Tensor]) -> None:
    """Forget the values of `weights`: they have none until each was written again."""
    give_back(weights)
