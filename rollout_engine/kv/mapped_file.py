"""Memory that holds the bytes of a file: mapped, or read into memory of this process.

Python's own `mmap` keeps a descriptor for each mapping; a step may hold more mappings than a process may have
descriptors. A mapping made here keeps none.
"""

import ctypes
import mmap
import os
from collections.abc import Callable

import numpy as np

from sync.shared_files import read_at

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
"""All pages are mapped by the one call: a fault for each would take as long as a copy of it."""
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """A range of addresses that is unmapped when this object ends."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self._place = address, num_bytes

    def __del__(self, unmap: Callable[[int, int], object] = _LIBC.munmap) -> None:
        unmap(*self._place)


def map_file(file: int, num_bytes: int) -> memoryview:
    """Map the first `num_bytes` (> 0) of an open file, read-only, until the memoryview and all its parts are gone.

    The file must keep its length: reading a page that it has lost ends the process (SIGBUS). Raises `OSError`.
    """
    address = _LIBC.mmap(None, num_bytes, mmap.PROT_READ, _FLAGS, file, 0)
    if address == _FAILED:
        problem = ctypes.get_errno()
        raise OSError(problem, os.strerror(problem))
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    memory.mapping = _Mapping(address, num_bytes)  # type: ignore[attr-defined]
    return np.ctypeslib.as_array(memory).data.toreadonly()


def copy_file(file: int, num_bytes: int, start: int) -> memoryview:
    """Read `num_bytes` of an open file from byte `start` on. Raises `OSError`, `EOFError` if it is shorter."""
    memory = np.empty(num_bytes, dtype=np.uint8).data
    if not read_at(file, memory, start):
        raise EOFError(f"it ended while {num_bytes} bytes were read")
    return memory.toreadonly()
