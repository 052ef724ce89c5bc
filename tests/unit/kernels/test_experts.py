"""Scores of experts: a softmax or sigmoids, whatever else is in the batch and on any number of threads."""

import pytest
import torch

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.experts import scores

pytestmark = pytest.mark.skipif(build.load_kernels() is None, reason="the C++ kernels cannot be built here")


@pytest.mark.parametrize("is_sigmoid", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_experts", [1, 5, 8, 60, 128])
def test_a_row_has_the_scores_of_torch(dtype, num_experts, is_sigmoid):
    logits = 8 * torch.randn(70, num_experts)
    logits[3, 0] = 300.0  # far beyond the others
    logits = logits.to(dtype)
    found = scores(logits, is_sigmoid=is_sigmoid)
    assert found.dtype is torch.float32 and found.shape == logits.shape
    torch.testing.assert_close(found, logits.float().sigmoid() if is_sigmoid else logits.float().softmax(-1))


@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_a_row_has_the_same_bits_alone_and_on_many_threads(thread_count, is_sigmoid):
    logits = torch.randn(600, 64)
    alone = torch.cat([scores(row[None], is_sigmoid=is_sigmoid) for row in logits])
    thread_count(2)
    assert torch.equal(scores(logits, is_sigmoid=is_sigmoid), alone)
    assert torch.equal(scores(logits.t().contiguous().t(), is_sigmoid=is_sigmoid), alone)  # strides of another order
