"""ctypes face of `stream.cpp`."""

from collections.abc import Callable
from ctypes import c_int64, c_void_p
from functools import cache

from rollout_engine.kernels.cpu import build


@cache
def streaming_copy() -> Callable[[int, int, int, int], int] | None:
    """`copy(out, source, num_bytes, width)` between two addresses that do not overlap; None where there are no kernels.

    For what is not read again soon: it leaves the caches as they are. The elements are `width` bytes wide (1, 2, 4 or
    8). Returns the largest of their bits without the sign: of floats, those of the largest magnitude.
    """
    kernels = build.load_kernels()
    if kernels is None:
        return None
    copy = kernels.stream_copy
    copy.argtypes, copy.restype = [c_void_p, c_void_p, c_int64, c_int64], c_int64
    return copy
