"""A model that sleeps gives its memory back to the system; its tensors keep their addresses."""

from collections.abc import Iterable

from torch import Tensor

from rollout_engine.kernels.cpu.stream import streaming_copy
from rollout_engine.kernels.memory import give_back, resident_bytes, trim
from rollout_engine.model.packed_weights import PackedWeights

__all__ = ["release_derived", "release_weights", "resident_bytes", "return_freed", "streaming_copy"]


def release_derived(packed: PackedWeights, *, forget: bool) -> None:
    """Free what can be made again of a model's packed weights; with `forget` all of them."""
    packed.release(forget=forget)
    return_freed()


def return_freed() -> None:
    """Have memory that was let go in small pieces return to the system."""
    trim()


def release_weights(weights: Iterable[Tensor]) -> None:
    """Forget the values of `weights`: they have none until each was written again."""
    give_back(weights)
