"""Memory of the fake device, with what is known of every byte, and the allocator that hands it out."""

import weakref
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.fake_device.streams import Clock, Timeline, join

POISON = 0xFF
"""Every byte of new memory: NaN as any float, -1 as any integer."""
_ROUND = 512
_STALE = 4
"""Memory up to so many times as large as what is asked for is handed out again."""


class Fault(NamedTuple):
    """A mistake in the order of accesses to memory."""

    kind: str
    """"race", "reuse", "uninitialised", "stale", "outside"."""
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass
class Life:
    """A time for which a block is handed out, in ticks."""

    num_bytes: int
    start: float
    end: float = float("inf")


class Block:
    """A piece of memory, which the allocator hands out many times."""

    def __init__(self, capacity: int, pool: Hashable, *, pinned: bool) -> None:
        self.capacity, self.pool, self.is_pinned = capacity, pool, pinned
        self.bytes = np.full(capacity + 2 * _ROUND, POISON, np.uint8)
        shift = -self.bytes.ctypes.data % _ROUND
        self.bytes = self.bytes[shift : shift + capacity]
        self.address = self.bytes.ctypes.data
        with torch.inference_mode(False):
            self.storage = torch.from_numpy(self.bytes).untyped_storage()
        self.is_set = np.zeros(capacity, np.bool_)
        """Bytes that have been written since they were handed out."""
        self.writer = np.zeros(capacity, np.int32)
        """Number of the access that wrote each byte last; 0: none."""
        self.readers: dict[str, np.ndarray] = {}
        """The same for the last read by each stream."""
        self.lives: list[Life] = []
        """The times for which it was handed out."""
        self.streams: set[str] = set()
        """Other streams that use it, as `record_stream` says."""
        self.uses: list[Clock] = []
        """Work that the allocator knows of, after which it may be handed out again."""

    def life_at(self, tick: float) -> Life | None:
        """What it was handed out for at that tick; None: it was free."""
        return next((life for life in reversed(self.lives) if life.start <= tick < life.end), None)

    @property
    def num_bytes(self) -> int:
        """Bytes that are in use now; 0 where it is free."""
        return self.lives[-1].num_bytes if self.is_in_use else 0

    @property
    def is_in_use(self) -> bool:
        """Whether it is handed out now."""
        return bool(self.lives) and self.lives[-1].end == float("inf")

    @property
    def is_of_graphs(self) -> bool:
        """Whether graphs keep it, even where no tensor does."""
        return isinstance(self.pool, tuple)

    @property
    def generation(self) -> int:
        """How often it has been handed out."""
        return len(self.lives)


class View(NamedTuple):
    """A tensor in a block, without a reference that keeps its memory from being freed."""

    block: Block
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    generation: int

    @classmethod
    def of(cls, tensor: Tensor, block: Block) -> "View":
        shape, stride = tuple(tensor.shape), tensor.stride()
        return cls(block, tensor.dtype, shape, stride, tensor.storage_offset(), block.generation)

    def tensor(self) -> Tensor:
        """The memory as a plain tensor of the host."""
        return torch.empty(0, dtype=self.dtype).set_(self.block.storage, self.offset, self.shape, self.stride)

    def elements(self) -> Tensor:
        """For each element its number in the block, int64, shaped and strided as the tensor."""
        every = torch.arange(self.block.capacity // self.dtype.itemsize)
        return every.as_strided(self.shape, self.stride, self.offset)

    def where(self) -> "slice | np.ndarray":
        """The bytes of its elements, in their order."""
        size, expected, count = self.dtype.itemsize, 1, 1
        for length, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if length != 1 and step != expected:
                return bytes_of(self.elements(), size)
            expected, count = expected * length, count * length
        return slice(self.offset * size, (self.offset + count) * size)


def bytes_of(elements: Tensor, size: int) -> np.ndarray:
    """The bytes of elements of `size` bytes, numbered from the block's start."""
    return (elements.reshape(-1, 1).numpy() * size + np.arange(size)).reshape(-1)


class Memory:
    """Every block. What is freed is handed out again first, as torch's caching allocators do."""

    def __init__(self, timeline: Timeline, *, reuses: bool) -> None:
        self._timeline, self._reuses = timeline, reuses
        self.blocks: dict[int, Block] = {}
        """By address."""
        self._free: dict[Hashable, list[Block]] = {}
        self._dropped: deque[Block] = deque()
        """Blocks whose tensors have been collected, not free yet: the interpreter may do that anywhere."""
        self._starts = np.empty(0, np.uint64)
        self.tick = 0.0
        self.num_bytes = self.peak = 0
        """Bytes handed out on the device, now and at most."""

    def block_of(self, tensor: Tensor) -> Block | None:
        """The block of a tensor, None for one of the host's own."""
        return self.blocks.get(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else None

    @property
    def starts(self) -> np.ndarray:
        """The addresses of all blocks, ascending: uint64 [n]."""
        if len(self._starts) != len(self.blocks):
            self._starts = np.sort(np.fromiter(self.blocks, np.uint64, len(self.blocks)))
        return self._starts

    def allocate(self, num_bytes: int, pool: Hashable, *, pinned: bool) -> tuple[Block, Tensor]:
        """A block, and a tensor uint8 over its bytes whose end gives it back."""
        self.settle()
        is_over = self._timeline.is_over
        fitting = [
            block
            for block in self._free.get(pool, []) * self._reuses
            if num_bytes <= block.capacity <= _STALE * max(num_bytes, _ROUND) and all(map(is_over, block.uses))
        ]
        if fitting:
            block = fitting[-1]
            self._free[pool].remove(block)
            for clock in block.uses:  # the allocator has asked for the events of these
                join(self._timeline.host, clock)
            block.uses.clear()
        else:
            block = Block(max(1, -(-num_bytes // _ROUND)) * _ROUND, pool, pinned=pinned)
            self.blocks[block.address] = block
        self.revive(block, num_bytes)
        held = block.bytes[: max(1, num_bytes)]
        weakref.finalize(held, self._dropped.append, block).atexit = False
        return block, torch.from_numpy(held)

    def revive(self, block: Block, num_bytes: int) -> None:
        """Note that a block is in use from now on."""
        self.tick += 1
        block.lives.append(Life(num_bytes, self.tick))
        self._count(block)

    def retire(self, block: Block) -> None:
        """Note that a block is not in use any more. One that is free stays so."""
        self.tick += 1
        if block.is_in_use:
            self._count(block, -1)
            block.lives[-1].end = self.tick

    def _count(self, block: Block, sign: int = 1) -> None:
        if not block.is_pinned:
            self.num_bytes += sign * block.num_bytes
            self.peak = max(self.peak, self.num_bytes)

    def settle(self) -> None:
        """Free what the interpreter has collected."""
        while self._dropped:
            block = self._dropped.popleft()
            self.retire(block)
            block.uses += (dict(self._timeline.streams[name].clock) for name in block.streams)
            block.streams.clear()
            self._free.setdefault(block.pool, []).append(block)
