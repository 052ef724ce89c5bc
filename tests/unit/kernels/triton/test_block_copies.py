"""Whole KV blocks are copied in every layer at once."""

import pytest
import torch

from rollout_engine.kernels.triton.block_copies import BlockCopies

PAIRS = [(0, 5), (3, 4), (0, 1)]


def pools(device, dtype):
    """Tensors of different widths: blocks of the first are smaller, those of the second larger than a piece."""
    g = torch.Generator().manual_seed(0)
    shapes = [(6, 2, 16, 8), (6, 2, 16, 640), (6, 1, 3, 5)]
    return [torch.randint(-100, 100, shape, generator=g).to(device, dtype) for shape in shapes]


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [2, 3])  # the third tensor's blocks are of no whole words
def test_every_byte_of_a_block_arrives_and_nothing_else_changes(device, dtype, count):
    made = pools(device, dtype)[:count]
    wanted = [pool.clone() for pool in made]
    for source, destination in PAIRS:
        for pool in wanted:
            pool[destination] = pool[source]
    BlockCopies(made).run(torch.tensor(PAIRS, device=device))
    assert all(torch.equal(*pair) for pair in zip(made, wanted, strict=True))
