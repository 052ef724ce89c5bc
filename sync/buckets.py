"""The place of each tensor in a packed transfer. Both sides compute it from the manifest, so it is not sent.

bucket 0: [ tensor | pad | tensor | pad | tensor ]   bucket 1: [ tensor larger than a bucket ]   ...
           ^ every start is a multiple of 64 bytes
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from sync.errors import SyncError
from sync.manifest import TensorSpec, torch_dtype

ALIGNMENT = 64
"""Bytes. A cache line, and more than any dtype asks for."""
NUM_BUFFERS = 2
"""Buffers at each end: one bucket is packed or unpacked while the other is under way."""
_MAX_BUCKET_BYTES = 2**40


class Slot(NamedTuple):
    """One tensor's place: byte `start` of its bucket."""

    spec: TensorSpec
    start: int


class Bucket(NamedTuple):
    """Tensors that travel together in `num_bytes` bytes."""

    slots: tuple[Slot, ...]
    num_bytes: int

    def views(self, buffer: Tensor) -> list[tuple[str, Tensor]]:
        """The name of each tensor, and the tensor as a view of the bucket's bytes (uint8 [num_bytes])."""
        return [(slot.spec.name, view_of(buffer, slot)) for slot in self.slots]


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """`specs` in order, into buckets of at most `bucket_bytes`; a larger tensor has a bucket to itself."""
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    end = 0
    for spec in specs:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if slots and start + spec.num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(slots), end))
            slots, start = [], 0
        slots.append(Slot(spec, start))
        end = start + spec.num_bytes
    return [*buckets, Bucket(tuple(slots), end)] if slots else buckets


def one_bucket(specs: Sequence[TensorSpec]) -> Bucket:
    """`specs` in order, all in one bucket."""
    buckets = plan_buckets(specs, sys.maxsize)
    return buckets[0] if buckets else Bucket((), 0)


def largest_bucket(buckets: Sequence[Bucket]) -> int:
    """Bytes of the largest one, 0 if there is none."""
    return max((bucket.num_bytes for bucket in buckets), default=0)


def view_of(buffer: Tensor, slot: Slot) -> Tensor:
    """The tensor of `slot` as a view of its bucket's bytes (uint8 [num_bytes])."""
    spec = slot.spec
    return buffer[slot.start : slot.start + spec.num_bytes].view(torch_dtype(spec.dtype)).view(spec.shape)


def check_bucket_bytes(bucket_bytes: int) -> None:
    """Raise `SyncError` unless buckets can have that size."""
    if type(bucket_bytes) is not int or not 1 <= bucket_bytes <= _MAX_BUCKET_BYTES:
        raise SyncError(f"bucket_bytes={bucket_bytes!r} is not allowed: must be an int in [1, 2**40].")
