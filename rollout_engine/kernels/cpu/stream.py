"""ctypes face of `stream.cpp`."""

from collections.abc import Callable
from ctypes import c_int64, c_void_p
from functools import cache

from rollout_engine.kernels.cpu import build


@cache
def streaming_copy() -> Callable[[int, int, int, int], int] | None:
    """`copy(out, source, num_bytes, width)` between two addresses that do not overlap; None where there are no kernels.

    For what is not read again soon: it leaves the caches as they are. The elements are `width` bytes wide (1, 2, 4 or
    8). Returns the largest of their bits without the sign: of floats, those of the largest magnitude. Raises
    `ValueError` where the numbers cannot be right; whether the memory is there, only its caller knows.
    """
    kernels = build.load_kernels()
    if kernels is None:
        return None
    stream_copy = kernels.stream_copy
    stream_copy.argtypes, stream_copy.restype = [c_void_p, c_void_p, c_int64, c_int64], c_int64

    def copy(out: int, source: int, num_bytes: int, width: int) -> int:
        if width not in (1, 2, 4, 8) or num_bytes < 0 or num_bytes % width or not (out and source or not num_bytes):
            raise ValueError(
                f"{num_bytes} bytes from address {source:#x} to {out:#x} should be whole elements of 1, 2, 4 or 8 "
                f"bytes, and they are of {width}."
            )
        return int(stream_copy(out, source, num_bytes, width))

    return copy
