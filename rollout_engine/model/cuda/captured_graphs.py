"""CUDA graphs over one memory pool, each captured only if the device has room for it.

On torch 2.11 and 2.12 a capture that fails leaks its pool, and may break later captures of the process
(pytorch/pytorch#180395, #190348). So memory is requested before a capture: as much as the computation took uncaptured.

An H200 with torch 2.11 captured and replayed them; no capture failed. Only tests cover a failed one.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

_MARGIN_BYTES = 256 << 20
"""Bytes left free besides a graph: for the driver's nodes, for pieces that the pool cuts otherwise, and for steps."""


class Captured(Protocol):
    """A computation over static memory."""

    def replay(self) -> None:
        """Compute again."""
        ...


Capture: TypeAlias = Callable[[Callable[[], None]], Captured]
"""Captures a computation; raises `NoRoomForGraph` if there was no room to begin."""


class NoRoomForGraph(Exception):
    """The device has too little free memory for a graph, whose capture was not begun."""


def can_capture(device: torch.device) -> bool:
    """Whether computations on `device` can be captured."""
    return device.type == "cuda"


class CudaGraph:
    """One CUDA graph."""

    def __init__(self, compute: Callable[[], None], pool: "torch.cuda._POOL_HANDLE") -> None:
        """Capture `compute`, whose kernels are compiled."""
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.current_stream()):  # a capture that fails leaves its own one current
            # Weights may be uploaded meanwhile: calls of other threads must not end the capture.
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                compute()

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()


class GraphPool:
    """Captures graphs that share memory; they must not run at the same time. After a failure, make another pool.

    `all_agree`: called before each capture with whether there is room here; it returns whether every rank has room.
    """

    def __init__(self, all_agree: Callable[[bool], bool] = bool) -> None:
        self._handle, self._all_agree = torch.cuda.graph_pool_handle(), all_agree
        self._num_bytes = 0
        """Bytes that the largest graph so far took; they serve smaller ones too."""

    def capture(self, compute: Callable[[], None]) -> CudaGraph:
        """Run `compute` once, so that its kernels are compiled, and capture it. Raises `NoRoomForGraph`."""
        try:
            needed = _bytes_of(compute)
        except torch.OutOfMemoryError as problem:
            raise NoRoomForGraph(str(problem)) from None
        torch.cuda.empty_cache()  # a graph takes its memory from the driver
        free, more = torch.cuda.mem_get_info()[0], max(0, needed - self._num_bytes)
        has_room = more + _MARGIN_BYTES <= free
        if not self._all_agree(has_room):
            own = f"{free >> 20} MiB are free, and it may take {(more + _MARGIN_BYTES) >> 20}"
            raise NoRoomForGraph("another rank has no room" if has_room else own)
        graph = CudaGraph(compute, self._handle)
        self._num_bytes = max(self._num_bytes, needed)
        return graph


def _bytes_of(compute: Callable[[], None]) -> int:
    """The most bytes that `compute` allocates at a time."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    compute()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
