"""ctypes wrapper of `stream.cpp`."""

from collections.abc import Callable
from ctypes import c_int64, c_void_p
from functools import cache

from rollout_engine.kernels.cpu import build


@cache
def streaming_copy() -> Callable[[int, int, int, int], int] | None:
    """`copy(out, source, num_bytes, width)` between two addresses, bypassing the CPU caches; None without the kernels.

    The two ranges must be valid memory, which is not checked, and must not overlap. Elements are `width` bytes wide
    (1, 2, 4 or 8). `copy` returns the largest of their bit patterns without the sign bit: of floats, those of the
    largest magnitude. It raises `ValueError` for other widths, partial elements and null addresses.
    """
    if build.load_kernels() is None:
        return None
    stream_copy = build.declared(stream_copy=(c_int64, c_void_p, c_void_p, c_int64, c_int64)).stream_copy

    def copy(out: int, source: int, num_bytes: int, width: int) -> int:
        if width not in (1, 2, 4, 8) or num_bytes < 0 or num_bytes % width or not (out and source or not num_bytes):
            raise ValueError(
                f"{num_bytes} bytes from address {source:#x} to {out:#x} should be whole elements of 1, 2, 4 or 8 "
                f"bytes, and they are of {width}."
            )
        return int(stream_copy(out, source, num_bytes, width))

    return copy
