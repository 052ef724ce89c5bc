"""The weights of one loaded model: their updates, and the memory that they take."""

import torch

from rollout_engine.model.backend import Backend
from rollout_engine.model.modules.loaded_model import LoadedModel
from rollout_engine.weights.copy_kernels import kernel_writer
from rollout_engine.weights.transaction import WeightUpdater


class ResidentWeights:
    """Owns `updater`, the transaction on the weights, and gives their memory back for a sleep."""

    def __init__(self, loaded: LoadedModel, backend: Backend, device: torch.device) -> None:
        self.updater = WeightUpdater.of(
            loaded.targets,
            loaded.aliases,
            backend.packed,
            backend.shadow_memory,
            loaded.names,
            prepare=lambda: self._memory.take_back(),
            committed=backend.reset_encoder_cache,
            writer=kernel_writer(device, backend.upload),
            config=loaded.module.config,
        )
        self._backend = backend
        self._memory = backend.memory_of([v for name, v in loaded.targets.items() if not backend.packed.holds(name)])

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that take memory now, without copies of them."""
        return self._memory.num_bytes

    def release(self, *, forget: bool) -> None:
        """Free copies of weights and the shadow of updates; on a device move the weights to the host.

        `forget`: free the weights and lose their values.
        """
        self._backend.reset_encoder_cache()
        self.updater.release(forget=forget)
        self._memory.release(forget=forget)

    def restore(self) -> None:
        """Undo `release(forget=False)`."""
        self._memory.derive()
