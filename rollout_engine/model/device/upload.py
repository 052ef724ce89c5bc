"""Small columns of a step on their way to the device, and results on their way back: one copy each way."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes: kernels are compiled for pointers that are multiples, and for those that are not."""
_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32", "float64", "bool")}


def upload(columns: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """`columns`, each contiguous, on the device, in their own shapes and dtypes; nothing waits for the copy."""
    ends = np.cumsum([0, *(-(-column.nbytes // _ALIGNMENT) * _ALIGNMENT for column in columns)]).tolist()
    packed = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = packed.numpy()
    for column, start in zip(columns, ends, strict=False):
        host[start : start + column.nbytes] = column.reshape(-1).view(np.uint8)
    if device.type == "cuda":  # the allocator of pinned memory keeps it until the copy has been made
        packed = packed.to(device, non_blocking=True)
    return [
        packed[start : start + column.nbytes].view(_DTYPES[column.dtype]).view(column.shape)
        for column, start in zip(columns, ends, strict=False)
    ]


class Download:
    """A tensor on its way to the host; its own memory may be written again at once."""

    def __init__(self, source: Tensor) -> None:
        self._event = None
        if source.device.type == "cuda":
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = source.clone()

    def wait(self) -> Tensor:
        """On the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
