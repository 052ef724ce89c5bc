"""Uploads the small columns of a step in one copy, and downloads its results in another."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes. Triton compiles kernels anew for pointers that are not multiples of it."""
_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32", "float64", "bool")}


def upload(columns: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy contiguous `columns` to the device, keeping shapes and dtypes; nothing waits for the copy."""
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


class StaticColumns:
    """Columns at fixed addresses, so that graphs read the values sent last."""

    def __init__(self, sizes: Sequence[tuple[torch.dtype, int]], device: torch.device) -> None:
        """`sizes`: dtype and length of each column."""
        ends = [0]
        for dtype, size in sizes:
            ends.append(ends[-1] + -(-dtype.itemsize * size // _ALIGNMENT) * _ALIGNMENT)
        self._sizes, self._starts = sizes, ends
        self.memory = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
        """uint8, all columns."""
        self.columns = self._views(self.memory)

    def send(self, columns: Sequence[tuple[np.ndarray, int, float]]) -> None:
        """Send all columns, (values, padded length, padding value) each, in one copy that nothing waits for."""
        packed = torch.empty(self.memory.shape, dtype=torch.uint8, pin_memory=self.memory.is_cuda)
        for view, (values, size, padding) in zip(self._views(packed), columns, strict=True):
            host = view.numpy()
            host[: len(values)] = values
            host[len(values) : size] = padding
        self.memory.copy_(packed, non_blocking=True)  # the allocator of pinned memory keeps it until then

    def _views(self, memory: Tensor) -> list[Tensor]:
        ends = (start + dtype.itemsize * size for (dtype, size), start in zip(self._sizes, self._starts, strict=False))
        spans = zip(self._sizes, self._starts, ends, strict=False)
        return [memory[start:end].view(dtype) for (dtype, _), start, end in spans]


class Download:
    """A copy of a tensor on its way to the host; the tensor may be written again at once."""

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
        """Wait for the copy and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
