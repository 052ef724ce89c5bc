"""What the host holds of the fake device's memory: arrays over pinned memory, and storages."""

from typing import Any

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds
from torch import UntypedStorage

from tests.fake_device.memory import Block


class WatchedArray(np.ndarray):
    """An array over pinned memory that tells of item assignments. Its `data` counts as written when asked for."""

    watcher: Any = None
    block: Any = None

    def __array_finalize__(self, parent: Any) -> None:
        self.watcher, self.block = getattr(parent, "watcher", None), getattr(parent, "block", None)

    def __setitem__(self, key: Any, value: Any) -> None:
        part = super().__getitem__(key)
        super().__setitem__(key, value)
        self._tell(part if isinstance(part, np.ndarray) else self)

    @property
    def data(self) -> memoryview:  # type: ignore[override]
        self._tell(self)
        return np.asarray(self).data

    def _tell(self, part: np.ndarray) -> None:
        if self.watcher is not None and part.size:
            low, high = (bound - self.block.address for bound in byte_bounds(np.asarray(part)))
            if 0 <= low < high <= self.block.capacity:  # else it is a copy
                self.watcher.host_writes_at(self.block, slice(low, high), "numpy")


class DeviceStorage:
    """The storage of a tensor on the device. Emptied and filled again, it keeps its place, which counts as another."""

    def __init__(self, watcher: Any, real: UntypedStorage, block: Block) -> None:
        self._watcher, self.real, self._block = watcher, real, block
        self.device = torch.device("cuda", 0)

    def data_ptr(self) -> int:
        return self.real.data_ptr()

    def nbytes(self) -> int:
        return self._block.num_bytes

    size = nbytes

    def resize_(self, num_bytes: int) -> "DeviceStorage":
        self._watcher.resize(self._block, num_bytes)
        return self
