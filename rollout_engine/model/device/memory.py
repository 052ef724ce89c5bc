"""Memory of tensors that goes back to the device while they stay what they are. It comes back at other addresses."""

from collections.abc import Iterable

import torch
from torch import Tensor


class Memory:
    """The storages of some tensors, each once."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._storages = list({storage.data_ptr(): storage for storage in storages}.values())
        self._sizes = [storage.nbytes() for storage in self._storages]

    @property
    def num_bytes(self) -> int:
        """Held now."""
        return sum(storage.nbytes() for storage in self._storages)

    def release(self) -> None:
        """Give it back; values are lost and must not be touched until `restore`."""
        for storage in self._storages:
            storage.resize_(0)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def restore(self) -> bool:
        """Take what was released again, zeros; whether there was any."""
        lost = [pair for pair in zip(self._storages, self._sizes, strict=True) if pair[0].nbytes() < pair[1]]
        for storage, size in lost:
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        return bool(lost)
