"""Memory of weights on the CPU: pages are returned to the system and allocated again when written; addresses stay."""

from collections.abc import Sequence

from torch import Tensor

from rollout_engine.kernels.memory import release_pages, resident_bytes, trim_allocator
from rollout_engine.model.cpu.model import CpuModel
from rollout_engine.model.packing.packed_weights import PackedWeights


class CpuWeightMemory:
    """Satisfies `backend.WeightMemory` for plain weights and the packed weights of a model."""

    def __init__(self, weights: Sequence[Tensor], packed: PackedWeights, model: CpuModel) -> None:
        self._weights, self._packed, self._model = weights, packed, model

    @property
    def num_bytes(self) -> int:
        return resident_bytes([*self._weights, *self._packed.panels])

    def release(self, *, forget: bool) -> None:
        if self._model.decoder is not None:
            self._model.decoder.release()
        self._packed.release(forget=forget)
        trim_allocator()
        if forget:
            release_pages(self._weights)

    def derive(self) -> None:
        self._packed.make()

    def take_back(self) -> None:
        """Do nothing: memory is allocated as it is written."""
