"""Memory that costs nothing before it is used."""

import math

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 4096


def lazy_zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU whose pages the system provides at first touch; `torch.zeros` writes them all at once."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)
