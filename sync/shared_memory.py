"""Memory of one CUDA device that another process can open, by CUDA's IPC handles."""

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing import reductions

from sync.devices import is_done_within
from sync.errors import SyncError

_cuda: Any = torch.cuda
_weak_reference: Callable[[UntypedStorage], Any] = reductions.StorageWeakRef


class MemoryHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A buffer of another process, as CUDA and torch name it: the fields of `_share_cuda_` but for the device."""

    storage: bytes
    num_bytes: int
    offset: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    event_sync_required: bool


class SharedMemory(Protocol):
    """Memory that another process can open by a handle."""

    name: str
    """The same name on both sides means that they can share memory."""

    def allocate(self, num_bytes: int) -> Tensor:
        """New memory of this kind, uint8 [num_bytes]."""

    def shares(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in memory of this kind."""

    def export(self, storage: UntypedStorage) -> MemoryHandle:
        """The handle of such memory, the same one as long as the memory lives."""

    def open(self, handle: MemoryHandle) -> Tensor:
        """Open another process's memory: all of the storage, as uint8. `SyncError` if that is not possible."""

    def close(self, opened: list[Tensor]) -> None:
        """Close another process's memory, which nothing uses any more, and empty the list."""
        opened.clear()

    def mark(self) -> Callable[[float], bool]:
        """A function that waits, at most the given seconds, for all work on the memory that this thread has launched so
        far; False if it is not done."""


class CudaMemory(SharedMemory):
    """Memory of one CUDA device, shared through CUDA's IPC handles."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._exported: dict[int, tuple[Any, MemoryHandle]] = {}
        self.name = str(torch.cuda.get_device_properties(device).uuid)

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def shares(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def export(self, storage: UntypedStorage) -> MemoryHandle:
        """The handle of `storage`. `SyncError` if the allocator keeps memory that cannot be shared."""
        # torch counts one more reader at each export, so each storage is exported once.
        self._exported = {key: pair for key, pair in self._exported.items() if not pair[0].expired()}
        whole: Any = storage
        if whole._cdata not in self._exported:
            self._exported[whole._cdata] = _weak_reference(whole), _handle_of(whole)
        return self._exported[whole._cdata][1]

    def open(self, handle: MemoryHandle) -> Tensor:
        storage_class: Any = torch.UntypedStorage
        try:
            storage = storage_class._new_shared_cuda(self._device.index, *msgspec.structs.astuple(handle))
        except (RuntimeError, OSError, ValueError) as problem:
            what = f"This process cannot open the trainer's memory on {self._device} ({problem})"
            advice = "Start the trainer without PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, let both processes be"
            raise SyncError(f"{what}. {advice} of one user and one container, or send by 'nccl'.") from None
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def close(self, opened: list[Tensor]) -> None:
        """Close memory under a stream without work: torch waits for the current one at each storage, and holds the
        interpreter meanwhile."""
        if opened:
            with torch.cuda.stream(_cuda.Stream(self._device)):
                opened.clear()

    def mark(self) -> Callable[[float], bool]:
        done = _cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        return lambda seconds: is_done_within(done, seconds)


def _handle_of(storage: Any) -> MemoryHandle:
    try:
        # The device index is dropped: the other process numbers devices on its own, and compares the memory's name.
        _, *fields = storage._share_cuda_()
    except RuntimeError as problem:
        advice = "Start the trainer without PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or send by 'nccl'."
        raise SyncError(f"The trainer's memory cannot be shared with another process ({problem}). {advice}") from None
    return MemoryHandle(*fields)
