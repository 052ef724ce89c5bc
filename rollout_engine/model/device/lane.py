"""A stream for copies of weights, beside the one that steps run on.

steps    ──── step ──── step ──── step ────┬── commit ──── step
copies   ┬────── copy ─ copy ─── copy ─────┘
         entered                           lead_steps
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import psutil
import torch
from torch import Tensor


class Lane(Protocol):
    """Copies one after the other, in the order in which they are started."""

    @property
    def room(self) -> int:
        """Bytes that `allocate` may give now."""
        ...

    def buffer(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of the host, from and to which copies need not wait."""
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of the device, which no step that was launched still uses."""
        ...

    def copy(self, out: Tensor, source: Tensor) -> Callable[[], object]:
        """Start one; returns what waits for it. The host leaves `source` alone until then."""
        ...

    def entered(self) -> AbstractContextManager[object]:
        """What this thread launches inside is a copy too. All copies come after what was launched before this."""
        ...

    def lead_steps(self) -> None:
        """Steps that are launched now come after the copies that were started."""

    def wait_for_steps(self) -> None:
        """Return when all that was launched is done."""


class CudaLane:
    """On a CUDA device. Unproven: no test without a device can tell whether streams are ordered."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    @property
    def room(self) -> int:
        """By the driver: what the allocator keeps for other streams is theirs."""
        return torch.cuda.mem_get_info(self._device)[0]

    def buffer(self, num_bytes: int) -> Tensor:
        """Pinned."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def allocate(self, num_bytes: int) -> Tensor:
        """What the allocator gives a stream was freed by work of that stream."""
        with torch.cuda.stream(self._stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def copy(self, out: Tensor, source: Tensor) -> Callable[[], object]:
        """As `Lane.copy`."""
        done = torch.cuda.Event(blocking=True)  # whoever waits leaves its core to others
        with torch.cuda.stream(self._stream):
            out.copy_(source, non_blocking=True)
            done.record()
        return done.synchronize

    @contextmanager
    def entered(self) -> Iterator[None]:
        """As `Lane.entered`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def lead_steps(self) -> None:
        """As `Lane.lead_steps`."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def wait_for_steps(self) -> None:
        """As `Lane.wait_for_steps`."""
        torch.cuda.current_stream(self._device).synchronize()


class HostLane:
    """Where the kernels' tensors are the host's: each call is done when it returns."""

    @property
    def room(self) -> int:
        """Of the system."""
        return psutil.virtual_memory().available

    def buffer(self, num_bytes: int) -> Tensor:
        """As `Lane.buffer`."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    allocate = buffer

    def entered(self) -> AbstractContextManager[object]:
        """As `Lane.entered`."""
        return nullcontext()

    def copy(self, out: Tensor, source: Tensor) -> Callable[[], object]:
        """As `Lane.copy`."""
        out.copy_(source)
        return lambda: None

    def lead_steps(self) -> None:
        """They are done."""

    wait_for_steps = lead_steps


def lane_of(device: torch.device) -> Lane:
    """A new one."""
    return CudaLane(device) if device.type == "cuda" else HostLane()
