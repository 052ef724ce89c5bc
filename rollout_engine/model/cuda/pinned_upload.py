"""Copies weights from the host to a device through a pair of pinned buffers, concurrently with steps.

host      fill 0 ── fill 1 ── wait for 0, fill 0 ── wait for 1, fill 1 ...
device              copy 0 ── copy 1 ────────────── copy 0 ...
"""

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rollout_engine.model.cuda.copy_stream import CopyStream

_BUFFER_BYTES = 32 << 20
"""Long enough that starting a copy costs nothing in comparison, a multiple of every element's size."""
_IN_FLIGHT = 2


class PinnedUpload:
    """A `sync.tensor_writer.Upload` to tensors on a device. Several threads may share it and its two buffers."""

    def __init__(self, stream: CopyStream, *, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self._stream, self._buffer_bytes = stream, buffer_bytes
        self._free: queue.SimpleQueue[tuple[Tensor, Callable[[], object]]] = queue.SimpleQueue()
        """Free buffers, each with a function that waits until its last copy is done."""
        for _ in range(_IN_FLIGHT):
            self._free.put((stream.buffer(buffer_bytes), lambda: None))

    def __call__(self, out: Tensor, fill: Callable[[memoryview, int], None]) -> None:
        """Have `fill` write the bytes of `out`, and copy them there; at most two pieces are under way."""
        target = out
        if not out.is_contiguous():
            target = self._stream.allocate(out.nbytes).view(out.dtype).view(out.shape)
        content = target.detach().view(-1).view(torch.uint8)
        for start in range(0, len(content), self._buffer_bytes):
            part = content[start : start + self._buffer_bytes]
            with self._buffer(len(part)) as (buffer, launch):
                fill(buffer.numpy().data, start)
                launch(part, buffer)
        if target is not out:
            self._stream.copy(out, target)

    @contextmanager
    def _buffer(self, num_bytes: int) -> Iterator[tuple[Tensor, Callable[[Tensor, Tensor], None]]]:
        """A buffer that no copy uses any more, and a function that starts a copy from it."""
        buffer, wait = self._free.get()

        def launch(out: Tensor, source: Tensor) -> None:
            nonlocal wait
            wait = self._stream.copy(out, source)

        try:
            wait()
            yield buffer[:num_bytes], launch
        finally:
            self._free.put((buffer, wait))
