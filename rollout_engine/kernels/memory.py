"""CPU memory that is only committed when first used, and can be released without losing its address."""

import ctypes
import math
import mmap
import sys
from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = mmap.PAGESIZE


def lazy_zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU whose pages the system commits at first touch; `torch.zeros` writes them all at once."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)


def release_pages(tensors: Iterable[Tensor]) -> None:
    """Return the pages of CPU tensors' storages to the system. Addresses stay; whole pages read as zeros afterwards.

    On other systems than Linux the tensors are zeroed and keep their memory. Raises `ValueError` for device tensors.
    """
    tensors = list(tensors)
    storages = _storages(tensors)
    if sys.platform != "linux":
        for tensor in tensors:
            tensor.zero_()
        return
    for address, storage in storages.items():
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = (address + storage.nbytes() - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if num_bytes > 0 and _libc().madvise(start, num_bytes, mmap.MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) failed")


def resident_bytes(tensors: Iterable[Tensor]) -> int:
    """Resident bytes of CPU tensors' storages, each storage counted once; all bytes on other systems than Linux.

    Raises `ValueError` for tensors on devices.
    """
    return sum(_resident(address, storage.nbytes()) for address, storage in _storages(tensors).items())


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Address -> storage. Raises `ValueError` for tensors that are not on the CPU."""
    storages = {}
    for tensor in tensors:
        if not tensor.is_cpu:
            raise ValueError(f"Tensors should be on the CPU, and one is on {tensor.device}.")
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
    return storages


def _resident(address: int, num_bytes: int) -> int:
    """Resident bytes of a range; the partial pages at its ends count if they are resident."""
    if sys.platform != "linux" or num_bytes == 0:
        return num_bytes
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    pages = np.zeros(-(-(address + num_bytes - start) // mmap.PAGESIZE), dtype=np.uint8)
    if _libc().mincore(start, address + num_bytes - start, pages.ctypes.data) != 0:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return min(int((pages & 1).sum()) * mmap.PAGESIZE, num_bytes)


def trim_allocator() -> None:
    """Let the allocator return its free memory to the system (glibc only)."""
    if hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(0)


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "madvise"):
        library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        library.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return library
