"""Memory that costs nothing before it is used, and can be given back without losing its address."""

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
    """Zeros on the CPU whose pages the system provides at first touch; `torch.zeros` writes them all at once."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)


def give_back(tensors: Iterable[Tensor]) -> None:
    """Return the pages of CPU tensors' storages to the system. Addresses stay; what was in whole pages reads as zeros.

    Linux only: elsewhere the tensors are zeroed and keep their memory. Raises `ValueError` for tensors elsewhere.
    """
    tensors = list(tensors)
    _check_on_host(tensors)
    if sys.platform != "linux":
        for tensor in tensors:
            tensor.zero_()
        return
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    for address, storage in storages.items():
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = (address + storage.nbytes() - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if num_bytes > 0 and _libc().madvise(start, num_bytes, mmap.MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) failed")


def resident_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of CPU tensors' storages that take memory now, each storage once. Other systems than Linux: all bytes.

    Raises `ValueError` for tensors elsewhere.
    """
    tensors = list(tensors)
    _check_on_host(tensors)
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(_resident(address, storage.nbytes()) for address, storage in storages.items())


def _check_on_host(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if not tensor.is_cpu:
            raise ValueError(f"Tensors should be on the CPU, and one is on {tensor.device}.")


def _resident(address: int, num_bytes: int) -> int:
    """Parts of a page at either end count if that page is resident."""
    if sys.platform != "linux" or num_bytes == 0:
        return num_bytes
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    pages = np.zeros(-(-(address + num_bytes - start) // mmap.PAGESIZE), dtype=np.uint8)
    if _libc().mincore(start, address + num_bytes - start, pages.ctypes.data) != 0:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return min(int((pages & 1).sum()) * mmap.PAGESIZE, num_bytes)


def trim() -> None:
    """Have the allocator return what it keeps for later, where it can (glibc)."""
    if hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(0)


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "madvise"):
        library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        library.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return library
