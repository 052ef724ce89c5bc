"""A stream for copies of weights, concurrent with the stream that steps run on.

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


class CopyStream(Protocol):
    """Runs copies one after the other, in the order in which they are started."""

    @property
    def num_free_bytes(self) -> int:
        """Bytes that `allocate` may still give."""
        ...

    def buffer(self, num_bytes: int) -> Tensor:
        """Host memory, uint8 [num_bytes], from and to which copies need not wait."""
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Device memory, uint8 [num_bytes], that no launched step still uses."""
        ...

    def copy(self, out: Tensor, source: Tensor) -> Callable[[], object]:
        """Start a copy; returns a function that waits for it. The host leaves `source` alone until then."""
        ...

    def enter(self) -> AbstractContextManager[object]:
        """Launch this thread's work inside on this stream, after everything launched before on the stream of steps."""
        ...

    def lead_steps(self) -> None:
        """Order steps launched from now on after the copies started so far."""

    def wait_for_steps(self) -> None:
        """Wait until everything launched on the stream of steps is done."""


class CudaCopyStream:
    """A stream of a CUDA device. That its copies and steps are ordered is shown on a fake device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    @property
    def num_free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]  # memory cached for other streams does not count

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def allocate(self, num_bytes: int) -> Tensor:
        with torch.cuda.stream(self._stream):  # the allocator reuses for a stream only memory freed on that stream
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def copy(self, out: Tensor, source: Tensor) -> Callable[[], object]:
        done = torch.cuda.Event(blocking=True)  # a waiting thread leaves its core to others
        with torch.cuda.stream(self._stream):
            out.copy_(source, non_blocking=True)
            done.record()
        return done.synchronize

    @contextmanager
    def enter(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def lead_steps(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def wait_for_steps(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


class HostCopyStream:
    """A stand-in if the kernels' tensors are the host's: each call is done when it returns."""

    @property
    def num_free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    allocate = buffer

    def copy(self, out: Tensor, source: Tensor) -> Callable[[], object]:
        out.copy_(source)
        return lambda: None

    def enter(self) -> AbstractContextManager[object]:
        return nullcontext()

    def lead_steps(self) -> None:
        pass

    wait_for_steps = lead_steps


def copy_stream_for(device: torch.device) -> CopyStream:
    """A new copy stream on `device`."""
    return CudaCopyStream(device) if device.type == "cuda" else HostCopyStream()
