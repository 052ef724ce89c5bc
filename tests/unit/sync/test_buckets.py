"""Both ends of a transport compute the same places for packed tensors."""

import pytest
import torch

from sync.buckets import ALIGNMENT, plan_buckets, view_of
from sync.manifest import describe

TENSORS = {f"t{i}": torch.randn(n) for i, n in enumerate([1, 16, 17, 300, 0, 5, 5])} | {"last": torch.arange(7)}
SPECS = [describe(name, tensor) for name, tensor in TENSORS.items()]


@pytest.mark.parametrize("bucket_bytes", [1, 64, 200, 1200, 1 << 20])
def test_every_tensor_survives_being_packed(bucket_bytes):
    names = []
    for bucket in plan_buckets(SPECS, bucket_bytes):
        buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        for slot in bucket.slots:
            view_of(buffer, slot).copy_(TENSORS[slot.spec.name])
        assert [describe(slot.spec.name, view_of(buffer, slot)) for slot in bucket.slots] == [
            s.spec for s in bucket.slots
        ]
        names += [slot.spec.name for slot in bucket.slots]
    assert names == list(TENSORS)


@pytest.mark.parametrize("bucket_bytes", [1, 64, 200, 1200])
def test_only_a_tensor_alone_exceeds_a_bucket(bucket_bytes):
    for bucket in plan_buckets(SPECS, bucket_bytes):
        assert bucket.num_bytes <= bucket_bytes or sum(slot.spec.num_bytes > 0 for slot in bucket.slots) == 1
        assert all(slot.start % ALIGNMENT == 0 for slot in bucket.slots)


def test_nothing_needs_no_bucket():
    assert plan_buckets([], 100) == []
