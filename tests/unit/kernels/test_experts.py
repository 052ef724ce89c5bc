"""Probabilities of experts: those of a softmax, whatever else is in the batch and on any number of threads."""

import pytest
import torch

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.experts import probabilities

pytestmark = pytest.mark.skipif(build.load_kernels() is None, reason="the C++ kernels cannot be built here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_experts", [1, 5, 8, 60, 128])
def test_a_row_has_the_probabilities_of_a_softmax(dtype, num_experts):
    logits = 8 * torch.randn(70, num_experts)
    logits[3, 0] = 300.0  # far beyond the others
    logits = logits.to(dtype)
    found = probabilities(logits)
    assert found.dtype is torch.float32 and found.shape == logits.shape
    torch.testing.assert_close(found, logits.float().softmax(-1))


def test_a_row_has_the_same_bits_alone_and_on_many_threads(thread_count):
    logits = torch.randn(600, 64)
    alone = torch.cat([probabilities(row[None]) for row in logits])
    thread_count(2)
    assert torch.equal(probabilities(logits), alone)
    assert torch.equal(probabilities(logits.t().contiguous().t()), alone)  # strides of another order
