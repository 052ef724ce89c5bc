"""The memory that the engines of a group share, by which tokens reach the experts of other engines.

numbers │ phases │ headers │ engine 0: rows │ experts │ outputs │ engine 1: ...
────────┴────────┴─────────┘
pages                        an engine writes its rows and their experts; the owners of these write the outputs
"""

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.cpu.phases import Phases
from rollout_engine.model.ranks.waves import NUM_FIELDS, Field

MAX_ENGINES = 64
_PAGE = 4096
_NUM_HEADERS = 8
_NUMBERS_BYTES = NUM_FIELDS * MAX_ENGINES * 8
_PHASES_BYTES = 2 * _PAGE
_HEADERS_BYTES = _NUM_HEADERS * MAX_ENGINES * 8
_ROWS_BYTES, _EXPERTS_BYTES, _OUTPUTS_BYTES = 1 << 30, 1 << 28, 4 << 30
_ENGINE_BYTES = _ROWS_BYTES + _EXPERTS_BYTES + _OUTPUTS_BYTES
_BEFORE_BYTES = _NUMBERS_BYTES + _PHASES_BYTES + _HEADERS_BYTES
_THREADS = threading.RLock()
"""The lock of a file shuts out other processes alone, and belongs to all threads of this one."""


class Header(NamedTuple):
    """The description of an engine's rows at one layer of one round."""

    phase: int
    """Number of the layer, counted over all rounds."""
    key: int
    """The weights that its rows were computed with."""
    num_rows: int
    num_chosen: int = 0
    """Experts of a row."""
    width: int = 0
    itemsize: int = 0


class Part(NamedTuple):
    """The rows of one engine at one layer, in shared memory."""

    rows: Tensor
    """[T, H]."""
    experts: Tensor
    """int64 [T, k], ascending in each row."""
    outputs: Tensor
    """[T * k, H]: the unweighted output of each expert of each row, written by the experts' owners."""


class GroupMemory:
    """The memory of a group, as one process sees it. Memory is taken as it is written.

    Args:
        descriptor: of a file of `total_bytes(size)` zeros, in memory, which all engines have open; it stays open.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor, self.size = descriptor, size
        memory = torch.frombuffer(mmap.mmap(descriptor, total_bytes(size)), dtype=torch.uint8)
        numbers, phases, headers, rest = memory.split(
            [_NUMBERS_BYTES, _PHASES_BYTES, _HEADERS_BYTES, size * _ENGINE_BYTES]
        )
        self.numbers = numbers.view(torch.int64).view(NUM_FIELDS, MAX_ENGINES)[:, :size].numpy()
        """int64 [NUM_FIELDS, size], as of `Waves`."""
        self.phases = Phases(phases, MAX_ENGINES + 1)
        """A counter of the phases that each engine has ended, and one of the rounds that have begun."""
        self._headers = headers.view(torch.int64).view(MAX_ENGINES, _NUM_HEADERS).numpy()
        sizes = [_ROWS_BYTES, _EXPERTS_BYTES, _OUTPUTS_BYTES]
        self._engines = [each.split(sizes) for each in rest.split(_ENGINE_BYTES)]

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside, no other engine or thread of this one is inside. The system ends it with the process."""
        with _THREADS:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def write(self, rank: int, phase: int, key: int, rows: Tensor, experts: Tensor) -> None:
        """Write an engine's rows [T, H] and their experts [T, k]. Raises `ConfigError` if there are too many."""
        num_outputs = experts.shape[1] * rows.nbytes
        if rows.nbytes > _ROWS_BYTES or num_outputs > _OUTPUTS_BYTES or 8 * experts.numel() > _EXPERTS_BYTES:
            what = f"a step has {len(rows)} rows of {rows.nbytes} bytes with {experts.shape[1]} experts each"
            raise ConfigError(f"data_parallel_size: {what}; give a smaller max_num_batched_tokens.")
        part = self._part(rank, len(rows), experts.shape[1], rows.shape[1], rows.dtype)
        part.rows.copy_(rows)
        part.experts.copy_(experts)
        header = Header(phase, key, len(rows), experts.shape[1], rows.shape[1], rows.itemsize)
        self._headers[rank, : len(header)] = header

    def read_header(self, rank: int) -> Header:
        """The header that an engine wrote last."""
        return Header(*map(int, self._headers[rank, : len(Header._fields)]))

    def read(self, rank: int, dtype: torch.dtype) -> Part | None:
        """The rows that an engine wrote last; None if it has none."""
        found = self.read_header(rank)
        return self._part(rank, found.num_rows, found.num_chosen, found.width, dtype) if found.num_rows else None

    def _part(self, rank: int, num_rows: int, num_chosen: int, width: int, dtype: torch.dtype) -> Part:
        rows, experts, outputs = self._engines[rank]
        size = num_rows * width * dtype.itemsize
        return Part(
            rows[:size].view(dtype).view(num_rows, width),
            experts[: num_rows * num_chosen * 8].view(torch.int64).view(num_rows, num_chosen),
            outputs[: size * num_chosen].view(dtype).view(num_rows * num_chosen, width),
        )


def total_bytes(size: int) -> int:
    """Bytes of addresses of a group of `size` engines."""
    return _BEFORE_BYTES + size * _ENGINE_BYTES


def make_memory(size: int) -> int:
    """Make the memory of a group; returns the descriptor. Raises `ConfigError` on systems without such memory."""
    if not hasattr(os, "memfd_create"):
        raise ConfigError(f"data_parallel_size={size} with divided experts needs Linux. Leave it out.")
    descriptor = os.memfd_create("rollout-engine-experts")
    os.ftruncate(descriptor, total_bytes(size))
    return descriptor


def mark_broken(descriptor: int, rank: int) -> None:
    """Note in a group's memory, from outside, that an engine has ended: the others end, too."""
    place = (Field.BROKEN * MAX_ENGINES + rank) * 8
    os.pwrite(descriptor, np.int64(1).tobytes(), place)
