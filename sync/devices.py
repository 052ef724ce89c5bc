"""CUDA devices: checks that a transport can work on one, and waits for its work by a deadline."""

import time
from typing import Any

import torch
import torch.distributed as dist

from sync.errors import SyncError

_POLL_SECONDS = 0.0005


def cuda_device(transport: str, name: str) -> torch.device:
    """The CUDA device called `name`, with its index. `SyncError` with advice when `transport` cannot work there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SyncError(f"device='{name}' is not a device: say 'cuda' or 'cuda:1'.") from None
    if device.type != "cuda":
        raise SyncError(f"Transport '{transport}' is for CUDA devices, not device='{name}'. On CPUs: 'shm' or 'gloo'.")
    if not torch.cuda.is_available():
        raise SyncError(
            f"Transport '{transport}' needs a CUDA device, and torch sees none here. On CPUs: 'shm', 'gloo'."
        )
    if transport == "nccl" and not dist.is_nccl_available():
        raise SyncError("Transport 'nccl' needs a torch built with NCCL; this one is not.")
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise SyncError(f"device='{name}': there are {count} CUDA devices, numbered from 0.")
    return torch.device("cuda", index)


def is_done_within(event: Any, seconds: float) -> bool:
    """Wait, at most for `seconds`, until a CUDA event has been reached; False if it is not."""
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
