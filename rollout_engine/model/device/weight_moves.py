"""How weights come into use on a device: staged beside steps, then copied over the live ones by one launch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, UntypedStorage

from rollout_engine.errors import WeightUpdateError
from rollout_engine.kernels.triton.copies import FusedCopy
from rollout_engine.model.device.lane import Lane


class DeviceMoves:
    """Satisfies `execution.shadow.Moves`."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    @property
    def room(self) -> int:
        """As the lane says."""
        return self._lane.room

    def allocate(self, num_bytes: int) -> UntypedStorage:
        """For the lane to write. Raises `WeightUpdateError` where the device is full."""
        try:
            return self._lane.allocate(num_bytes).untyped_storage()
        except torch.OutOfMemoryError as problem:
            what = f"The device has no memory for a shadow of the weights ({problem})."
            advice = "Update with staging='inplace', or leave more by a lower gpu_memory_utilization."
            raise WeightUpdateError(f"{what} {advice}") from None

    def beside_steps(self) -> AbstractContextManager[object]:
        """On the lane."""
        return self._lane.entered()

    def overwriting(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Call what it returns where no step is launched meanwhile: steps before it read the old bytes, those after it
        the new ones, all that was staged before it included."""
        fused = FusedCopy(pairs)
        if pairs:
            _compile(pairs[0][0].device)

        def overwrite() -> None:
            self._lane.lead_steps()
            fused.run()
            self._lane.wait_for_steps()  # the stall is told as it is, and what fails fails here

        return overwrite


def _compile(device: torch.device) -> None:
    """Run the kernel in all its forms on memory of its own: else steps wait for a compiler in the first commit."""
    one, other = (torch.zeros(32, dtype=torch.uint8, device=device) for _ in range(2))
    FusedCopy([(one[:16], other[:16]), (one[17:], other[17:])]).run()
