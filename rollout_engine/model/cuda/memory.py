"""Memory of tensors that is given back to the device while the tensors live on. It returns at other addresses.

Meanwhile values may wait in pinned memory of the host:

    storages   |    a    | b |         c         |
    chunks     |      0      |      1      |  2  |      one run of bytes, cut twice
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage

from rollout_engine.base.errors import LifecycleError, StepMemoryError

_CHUNK_BYTES = 256 << 20
"""The allocator of pinned memory rounds up to a power of two: one piece of all weights could take twice their size."""


class ReleasableMemory:
    """The storages of some tensors, each counted once."""

    def __init__(self, tensors: Iterable[Tensor], *, chunk_bytes: int = _CHUNK_BYTES) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._storages = list({storage.data_ptr(): storage for storage in storages}.values())
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []
        """Pinned memory, kept from one `release` to the next: pinning takes longer than copying."""
        self._has_values = False
        """Whether the chunks hold the released values."""

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device now."""
        return sum(storage.nbytes() for storage in self._storages)

    def release(self, *, keep: bool = False) -> None:
        """Give the memory back; nothing may touch the tensors until `restore`. `keep`: values wait on the host.

        Raises `LifecycleError`, and releases nothing, when the host has no memory for the values.
        """
        if not keep:
            self._chunks, self._has_values = [], False
        elif self.num_bytes:
            self._take_chunks()
            for values, kept in self._pieces():
                kept.copy_(values, non_blocking=True)
            self._has_values = True
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # until values are copied and nothing writes any more
        for storage in self._storages:
            storage.resize_(0)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def restore(self) -> bool:
        """Allocate all released memory, with the kept values or zeros; returns whether anything had been released.

        Raises `StepMemoryError`, and allocates nothing, when the device has no memory for it.
        """
        lost = [pair for pair in zip(self._storages, self._sizes, strict=True) if pair[0].nbytes() < pair[1]]
        self._take(lost)
        if self._has_values:
            for values, kept in self._pieces():
                values.copy_(kept, non_blocking=True)
            self._has_values = False
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # the chunks may be written again
        else:
            for storage, _ in lost:
                _bytes_of(storage).zero_()
        return bool(lost)

    def _take(self, lost: list[tuple[UntypedStorage, int]]) -> None:
        try:
            for storage, size in lost:
                storage.resize_(size)
        except torch.OutOfMemoryError as problem:
            for storage, _ in lost:
                storage.resize_(0)
            torch.cuda.empty_cache()
            what = f"The device has no memory for {sum(size for _, size in lost)} bytes that were released ({problem})."
            raise StepMemoryError(f"{what} Free what else takes it, and try again.") from None

    def _take_chunks(self) -> None:
        total, pinned = sum(self._sizes), any(storage.device.type == "cuda" for storage in self._storages)
        starts = range(0, total, self._chunk_bytes)[len(self._chunks) :]
        try:
            for start in starts:
                size = min(self._chunk_bytes, total - start)
                self._chunks.append(_host_memory(size, pinned))
        except RuntimeError as problem:
            self._chunks = []
            what = f"sleep: the host has no memory for {total} bytes of weights, which stay on the device ({problem})."
            raise LifecycleError(f"{what} Sleep at level 2, which forgets them, or wake up.") from None

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs uint8: a part of a storage, and the part of a chunk that keeps it."""
        place = 0
        for storage in self._storages:
            start = 0
            while start < storage.nbytes():
                chunk = self._chunks[place // self._chunk_bytes][place % self._chunk_bytes :]
                size = min(len(chunk), storage.nbytes() - start)
                yield _bytes_of(storage)[start : start + size], chunk[:size]
                start, place = start + size, place + size


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_memory(num_bytes: int, pinned: bool) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
