"""Weights cross from the host to a device through a pair of pinned buffers, beside steps.

host      fill 0 ── fill 1 ── wait for 0, fill 0 ── wait for 1, fill 1 ...
device              copy 0 ── copy 1 ────────────── copy 0 ...
"""

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rollout_engine.model.device.lane import Lane

_BUFFER_BYTES = 32 << 20
"""Long enough that starting a copy costs nothing beside it, a multiple of every element's size."""
_IN_FLIGHT = 2


class PinnedCrossing:
    """Satisfies `sync.arrival.Crossing` for places on a device. Several threads may share it, and the two buffers."""

    def __init__(self, lane: Lane, *, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self._lane, self._buffer_bytes = lane, buffer_bytes
        self._free: queue.SimpleQueue[tuple[Tensor, Callable[[], object]]] = queue.SimpleQueue()
        """With what waits until the last copy is done with the buffer."""
        for _ in range(_IN_FLIGHT):
            self._free.put((lane.buffer(buffer_bytes), lambda: None))

    def bring(self, out: Tensor, fill: Callable[[memoryview, int], None]) -> None:
        """As `Crossing.bring`: two pieces at most are under way."""
        target = out if out.is_contiguous() else self._contiguous(out)
        for part, start in self._parts(target):
            with self._buffer(part.numel()) as (buffer, launch):
                fill(buffer.numpy().data, start)
                launch(part, buffer)
        if target is not out:
            self._lane.copy(out, target)

    def _parts(self, tensor: Tensor) -> Iterator[tuple[Tensor, int]]:
        """uint8, that fit a buffer, and where they start."""
        content = tensor.detach().view(-1).view(torch.uint8)
        for start in range(0, len(content), self._buffer_bytes):
            yield content[start : start + self._buffer_bytes], start

    def _contiguous(self, like: Tensor) -> Tensor:
        return self._lane.allocate(like.nbytes).view(like.dtype).view(like.shape)

    @contextmanager
    def _buffer(self, num_bytes: int) -> Iterator[tuple[Tensor, Callable[[Tensor, Tensor], Callable[[], object]]]]:
        """One that no copy uses any more, and what starts a copy that does."""
        buffer, wait = self._free.get()

        def launch(out: Tensor, source: Tensor) -> Callable[[], object]:
            nonlocal wait
            wait = self._lane.copy(out, source)
            return wait

        try:
            wait()
            yield buffer[:num_bytes], launch
        finally:
            self._free.put((buffer, wait))
