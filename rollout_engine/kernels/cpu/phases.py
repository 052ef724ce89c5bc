"""Counters by which processes that share memory wait for one another (`phases.cpp`)."""

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.arguments import address

_LOOKS = 24_000
"""Looks of one `wait`: spins, yields, and a tenth of a second of naps."""


def is_available() -> bool:
    """Whether the kernels could be built here."""
    return build.load_kernels() is not None


class Phases:
    """`count` counters, which grow. Each is raised by one thread at a time.

    Args:
        memory: uint8, at least `num_bytes(count)`, zeros at first, aligned to 64 bytes; each process maps the same.
    """

    def __init__(self, memory: Tensor, count: int) -> None:
        self._memory, self.count = memory[: num_bytes(count)], count
        self._address = address("memory", self._memory, torch.uint8, (num_bytes(count),))
        if self._address % 64:
            raise ValueError(f"memory should be aligned to 64 bytes, and is at {self._address:#x}.")

    def read(self, index: int) -> int:
        """The value of a counter; all that was written before it was raised is seen now."""
        return int(_library().phases_read(self._address, index))

    def raise_to(self, index: int, value: int) -> None:
        """Set a counter to a value that it has not reached."""
        _library().phases_raise(self._address, index, value)

    def announce(self, index: int, value: int) -> None:
        """Do as `raise_to`, and wake threads that `sleep`."""
        _library().phases_announce(self._address, index, value)

    def wait(self, count: int, value: int) -> bool:
        """Whether the first `count` counters reach `value` within a tenth of a second or so."""
        return bool(_library().phases_wait(self._address, count, value, _LOOKS))

    def sleep(self, index: int, value: int, seconds: float) -> bool:
        """Whether a counter is above `value`, after a sleep of up to `seconds`, which `announce` ends."""
        return bool(_library().phases_sleep(self._address, index, value, int(seconds * 1e9)))


def num_bytes(count: int) -> int:
    """Bytes of that number of counters."""
    return int(_library().phases_bytes(count))


@cache
def _library() -> ctypes.CDLL:
    return build.declared(
        phases_bytes=(c_int64, c_int64),
        phases_read=(c_int64, c_void_p, c_int64),
        phases_raise=(None, c_void_p, c_int64, c_int64),
        phases_announce=(None, c_void_p, c_int64, c_int64),
        phases_wait=(c_int32, c_void_p, c_int64, c_int64, c_int64),
        phases_sleep=(c_int32, c_void_p, c_int64, c_int64, c_int64),
    )
