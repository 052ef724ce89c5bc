"""Device memory for the next values of weights, written while steps run and copied over the live ones at once."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, UntypedStorage

from rollout_engine.base.errors import WeightUpdateError
from rollout_engine.kernels.triton.copies import FusedCopy
from rollout_engine.model.cuda.copy_stream import CopyStream


class CudaShadowMemory:
    """Satisfies `backend.ShadowMemory`; shadows belong to `stream`, which writes them."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream

    @property
    def num_free_bytes(self) -> int:
        return self._stream.num_free_bytes

    def allocate(self, num_bytes: int) -> UntypedStorage:
        try:
            return self._stream.allocate(num_bytes).untyped_storage()
        except torch.OutOfMemoryError as problem:
            raise WeightUpdateError(
                f"The device has no memory for a shadow of the weights ({problem}). Update with staging='inplace', or "
                "leave more by a lower gpu_memory_utilization."
            ) from None

    def beside_steps(self) -> AbstractContextManager[object]:
        return self._stream.enter()

    def prepare_copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """One launch, ordered after all staging and all earlier steps. Call the result while no step is launched."""
        fused = FusedCopy(pairs)
        if pairs:
            _compile(pairs[0][0].device)

        def copy() -> None:
            self._stream.lead_steps()
            fused.run()
            self._stream.wait_for_steps()  # so that the stall is measured, and failures are raised, here

        return copy


def _compile(device: torch.device) -> None:
    """Run the kernel in all its forms once, or else steps would wait for the compiler in the first commit."""
    one, other = (torch.zeros(32, dtype=torch.uint8, device=device) for _ in range(2))
    FusedCopy([(one[:16], other[:16]), (one[17:], other[17:])]).run()
