"""Memory that another process can open: that of one CUDA device, through CUDA's handles."""

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing import reductions

from sync.errors import SyncError

_cuda: Any = torch.cuda
_weak_reference: Callable[[UntypedStorage], Any] = reductions.StorageWeakRef


class MemoryHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A buffer of another process, as CUDA and torch's allocator name it."""

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
    """Equal on both sides exactly if they can share."""

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]."""

    def shares(self, tensor: Tensor) -> bool:
        """Whether it lies in memory of this kind."""

    def export(self, storage: UntypedStorage) -> MemoryHandle:
        """The handle of such memory, the same as long as it lives."""

    def open(self, handle: MemoryHandle) -> Tensor:
        """The other process's memory, all of the storage, uint8."""

    def mark(self) -> Callable[[], object]:
        """A function that returns once all work on the memory that this thread has started by now is done."""


class CudaMemory:
    """Memory of one CUDA device, shared through CUDA's IPC handles. Unproven."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._exported: dict[int, tuple[Any, MemoryHandle]] = {}
        self.name = str(torch.cuda.get_device_properties(device).uuid)

    def allocate(self, num_bytes: int) -> Tensor:
        """As `SharedMemory.allocate`."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def shares(self, tensor: Tensor) -> bool:
        """As `SharedMemory.shares`."""
        return tensor.device == self._device

    def export(self, storage: UntypedStorage) -> MemoryHandle:
        """As `SharedMemory.export`. `SyncError` where the allocator keeps memory that cannot be shared."""
        # Each export has torch count readers once more, so there is one for each storage.
        self._exported = {key: pair for key, pair in self._exported.items() if not pair[0].expired()}
        whole: Any = storage
        if whole._cdata not in self._exported:
            self._exported[whole._cdata] = _weak_reference(whole), _handle_of(whole)
        return self._exported[whole._cdata][1]

    def open(self, handle: MemoryHandle) -> Tensor:
        """As `SharedMemory.open`."""
        storage_class: Any = torch.UntypedStorage
        storage = storage_class._new_shared_cuda(
            self._device.index,
            handle.storage,
            handle.num_bytes,
            handle.offset,
            handle.ref_counter,
            handle.ref_counter_offset,
            handle.event,
            handle.event_sync_required,
        )
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def mark(self) -> Callable[[], object]:
        """As `SharedMemory.mark`: on the current stream."""
        done = _cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(self._device))
        return done.synchronize  # type: ignore[no-any-return]


def _handle_of(storage: Any) -> MemoryHandle:
    try:
        # The other process has its own numbering of devices; the memory's name says that it is the same one.
        _, handle, num_bytes, offset, counter, counter_offset, event, sync_required = storage._share_cuda_()
    except RuntimeError as problem:
        advice = "Start the trainer without PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or send by 'nccl'."
        raise SyncError(f"The trainer's memory cannot be shared with another process ({problem}). {advice}") from None
    return MemoryHandle(handle, num_bytes, offset, counter, counter_offset, event, sync_required)
