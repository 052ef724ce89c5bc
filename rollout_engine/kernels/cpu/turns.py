"""Barriers of processes that share memory (`turns.cpp`). Waiting spins briefly, then yields the core."""

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.arguments import address


class BrokenTurnsError(Exception):
    """A barrier was broken: another process has ended or failed, and will not arrive."""


def is_available() -> bool:
    """Whether the kernels could be built here."""
    return build.load_kernels() is not None


class Turns:
    """One barrier of `num_ranks` processes.

    Args:
        memory: uint8, at least `num_bytes()`, zeros at first, aligned to 64 bytes; each process maps the same.
    """

    def __init__(self, memory: Tensor, num_ranks: int) -> None:
        self._memory, self.num_ranks = memory[: num_bytes()], num_ranks
        self.address = address("memory", self._memory, torch.uint8, (num_bytes(),))
        if self.address % 64:
            raise ValueError(f"memory should be aligned to 64 bytes, and is at {self.address:#x}.")

    def meet(self) -> None:
        """Return once every process has called it. Always raises `BrokenTurnsError` after `break_` was called."""
        if not _library().turns_meet(self.address, self.num_ranks):
            raise BrokenTurnsError("a rank has ended or failed")

    def break_(self) -> None:
        """Break the barrier: all waits, now and later, fail."""
        _library().turns_break(self.address)

    @property
    def are_broken(self) -> bool:
        """Whether `break_` was called, by any process."""
        return bool(_library().turns_are_broken(self.address))


def num_bytes() -> int:
    """Bytes of one barrier."""
    return int(_library().turns_bytes())


@cache
def _library() -> ctypes.CDLL:
    return build.declared(
        turns_bytes=(c_int64,),
        turns_meet=(c_int32, c_void_p, c_int32),
        turns_break=(None, c_void_p),
        turns_are_broken=(c_int32, c_void_p),
    )
