"""Memory of weights on the device: asleep they leave it, and may wait on the host."""

from collections.abc import Iterable

from torch import Tensor

from rollout_engine.model.cuda.memory import ReleasableMemory
from rollout_engine.model.cuda.runner import CudaRunner


class CudaWeightMemory:
    """Satisfies `backend.WeightMemory`: nothing is derived from weights."""

    def __init__(self, weights: Iterable[Tensor], runner: CudaRunner) -> None:
        self._memory, self._runner = ReleasableMemory(weights), runner

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    def release(self, *, forget: bool) -> None:
        if self._runner.graphs is not None:
            self._runner.graphs.void()  # they hold addresses
        self._memory.release(keep=not forget)

    def derive(self) -> None:
        self._memory.restore()

    def take_back(self) -> None:
        self._memory.restore()
