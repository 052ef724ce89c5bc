"""Bounds of stores of blocks for which the user gives none."""

import psutil

DEFAULT_BYTES = 4 << 30
"""Bound of a store, unless a quarter of the free bytes is less."""


def default_bytes(num_free: int) -> int:
    """The bound of a store that may take `num_free` bytes at most: 4 GiB, or a quarter of them if that is less."""
    return min(DEFAULT_BYTES, num_free // 4)


def free_memory() -> int:
    """Bytes of memory that this machine can give to processes."""
    return int(psutil.virtual_memory().available)
