"""Copies of many tensors at once."""

import pytest
import torch

from rollout_engine.kernels.triton.copies import FusedCopy


def _sources(device):
    g = torch.Generator().manual_seed(0)
    buffer = torch.randn(5000, generator=g).to(device)
    return [
        torch.randn(100, 90, generator=g).to(device, torch.bfloat16),
        torch.randn(3, generator=g).to(device, torch.bfloat16),  # no whole word
        torch.randn(16390, generator=g).to(device),
        torch.randint(-100, 100, (4099,), generator=g, dtype=torch.int8).to(device),
        torch.empty(0, 7, device=device),
        buffer[1:4500],  # not aligned
        torch.tensor(2.5, device=device),
    ]


def test_every_byte_arrives_and_nothing_else_changes(device):
    sources = _sources(device)
    around = [torch.full((x.numel() + 64,), 77, dtype=x.dtype, device=device) for x in sources]
    targets = [a[32 : 32 + x.numel()].view(x.shape) for a, x in zip(around, sources, strict=True)]
    copy = FusedCopy(list(zip(sources, targets, strict=True)))
    for _ in range(2):
        copy.run()
        for source, target, whole in zip(sources, targets, around, strict=True):
            assert torch.equal(source, target)
            assert (whole[:32] == 77).all() and (whole[-32:] == 77).all()
        for source in sources:
            source.mul_(-1)  # staged anew in the same place
    assert copy.num_bytes == sum(x.nbytes for x in sources)


def test_no_pairs_are_no_work():
    copy = FusedCopy([])
    copy.run()
    assert copy.num_bytes == 0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.zeros(3), "like its destination"),
        (torch.zeros(4, dtype=torch.float64), "like its destination"),
        (torch.zeros(8)[::2], "contiguous"),
    ],
)
def test_pairs_must_match(target, message):
    with pytest.raises(ValueError, match=message):
        FusedCopy([(torch.zeros(4), target)])
