"""Where each tensor of a manifest lies when tensors travel packed: both sides compute it, nobody sends it.

bucket 0: [ tensor | pad | tensor | pad | tensor ]   bucket 1: [ tensor larger than a bucket ]   ...
           ^ every start is a multiple of 64 bytes
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from sync.manifest import TensorSpec, torch_dtype

ALIGNMENT = 64
"""Bytes. A cache line, and more than any dtype asks for."""


class Slot(NamedTuple):
    """One tensor's place: byte `start` of its bucket."""

    spec: TensorSpec
    start: int


class Bucket(NamedTuple):
    """Tensors that travel together in `num_bytes` bytes."""

    slots: tuple[Slot, ...]
    num_bytes: int


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


def view_of(buffer: Tensor, slot: Slot) -> Tensor:
    """The tensor of `slot` as a view of its bucket's bytes (uint8 [num_bytes])."""
    spec = slot.spec
    return buffer[slot.start : slot.start + spec.num_bytes].view(torch_dtype(spec.dtype)).view(spec.shape)
