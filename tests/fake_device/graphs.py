"""CUDA graphs on the fake device: launches that are noted when captured, and queued again at every replay."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.fake_device.streams import Operation


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    device: Any

    def __init__(self) -> None:
        self.pool: Any = None
        self.launches: list[tuple[str, Callable[[Operation], None]]] = []

    def replay(self) -> None:
        """Queue every launch on this thread's stream."""
        for name, run in self.launches:
            self.device.launch_on(self.device.current, f"{name}, in a graph,", run)

    def reset(self) -> None:
        self.launches = []


def graph_context(device: Any) -> Any:
    """Stands in for `torch.cuda.graph`."""

    @contextmanager
    def graph(cuda_graph: Graph, pool: Any = None, stream: Any = None, **options: Any) -> Iterator[None]:
        assert device.capture is None, "one capture at a time"
        device.waits("torch.cuda.graph", "device", device.timeline.everything())
        cuda_graph.device, cuda_graph.pool, cuda_graph.launches = device, pool or object(), []
        device.local.capture = cuda_graph
        try:
            yield
        finally:
            device.local.capture = None

    return graph
