"""The place of each tensor in a packed transfer. Both sides compute it from the manifest, so it is not sent.

bucket 0: [ tensor | pad | tensor | pad | tensor ]   bucket 1: [ tensor larger than a bucket ]   ...
           ^ every start is a multiple of 64 bytes

If only some pieces of a tensor are sent, they stand one after the other in its place.
"""

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from sync.digests import PIECE_BYTES, tensor_bytes
from sync.errors import SyncError
from sync.manifest import TensorSpec, torch_dtype
from sync.pieces import Lacking, Part

ALIGNMENT = 64
"""Bytes. A cache line, and more than any dtype asks for."""
NUM_BUFFERS = 2
"""Buffers at each end: one bucket is packed or unpacked while the other is under way."""
_MAX_BUCKET_BYTES = 2**40


class Slot(NamedTuple):
    """The place of a tensor, or of pieces of it: byte `start` of its bucket."""

    spec: TensorSpec
    start: int
    part: Part | None = None
    """The pieces that travel; None: all of it."""

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return (self.spec if self.part is None else self.part).num_bytes


class Bucket(NamedTuple):
    """Tensors that travel together in `num_bytes` bytes."""

    slots: tuple[Slot, ...]
    num_bytes: int

    def views(self, buffer: Tensor) -> list[tuple[str, Tensor]]:
        """The name of each tensor, and its `view_of` the bucket's bytes (uint8 [num_bytes])."""
        return [(slot.spec.name, view_of(buffer, slot)) for slot in self.slots]


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int, lacking: Lacking | None = None) -> list[Bucket]:
    """`specs` in order, into buckets of at most `bucket_bytes`; a larger tensor has a bucket to itself.

    `lacking`: only these tensors, or these pieces of them.
    """
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    end = 0
    for spec in specs if lacking is None else [spec for spec in specs if spec.name in lacking]:
        slot = Slot(spec, -(-end // ALIGNMENT) * ALIGNMENT, lacking[spec.name] if lacking else None)
        if slots and slot.start + slot.num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(slots), end))
            slots, slot = [], slot._replace(start=0)
        slots.append(slot)
        end = slot.start + slot.num_bytes
    return [*buckets, Bucket(tuple(slots), end)] if slots else buckets


def one_bucket(specs: Sequence[TensorSpec]) -> Bucket:
    """`specs` in order, all in one bucket."""
    buckets = plan_buckets(specs, sys.maxsize)
    return buckets[0] if buckets else Bucket((), 0)


def largest_bucket(buckets: Sequence[Bucket]) -> int:
    """Bytes of the largest one, 0 if there is none."""
    return max((bucket.num_bytes for bucket in buckets), default=0)


def view_of(buffer: Tensor, slot: Slot) -> Tensor:
    """The tensor of `slot` as a view of its bucket's bytes (uint8 [num_bytes]); its pieces alone as one flat tensor."""
    values = buffer[slot.start : slot.start + slot.num_bytes].view(torch_dtype(slot.spec.dtype))
    return values.view(slot.spec.shape) if slot.part is None else values


def piece_reader(buffer: Tensor, slot: Slot) -> Callable[[memoryview, int], None]:
    """A function `read(piece, start)` that fills `piece` with the piece of the tensor which begins at byte `start`.

    The bucket's bytes (uint8 [num_bytes], the host's) hold all of the tensor, or at least that piece.
    """
    memory = tensor_bytes(buffer)[slot.start : slot.start + slot.num_bytes]
    ranks = None if slot.part is None else {index: i for i, index in enumerate(slot.part.indices)}

    def read(piece: memoryview, start: int) -> None:
        first = start if ranks is None else ranks[start // PIECE_BYTES] * PIECE_BYTES
        piece[:] = memory[first : first + len(piece)]

    return read


def check_bucket_bytes(bucket_bytes: int) -> None:
    """Raise `SyncError` unless buckets can have that size."""
    if type(bucket_bytes) is not int or not 1 <= bucket_bytes <= _MAX_BUCKET_BYTES:
        raise SyncError(f"bucket_bytes={bucket_bytes!r} is not allowed: must be an int in [1, 2**40].")
