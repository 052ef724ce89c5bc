"""Small columns of a step on their way to the device, and results on their way back: one copy each way."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(columns: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """`columns` as int64 tensors on the device; nothing waits for the copy."""
    packed = torch.from_numpy(np.concatenate(columns).astype(np.int64, copy=False))
    if device.type == "cuda":  # the allocator of pinned memory keeps it until the copy has been made
        packed = packed.pin_memory().to(device, non_blocking=True)
    return list(packed.split([len(column) for column in columns]))


class Download:
    """A tensor on its way to the host."""

    def __init__(self, source: Tensor) -> None:
        self._event = None
        if source.device.type == "cuda":
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = source

    def wait(self) -> Tensor:
        """On the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
