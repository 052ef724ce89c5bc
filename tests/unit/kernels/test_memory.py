"""Lazily provided zeros."""

import psutil
import pytest
import torch

from rollout_engine.kernels.memory import lazy_zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_zeros_of_the_shape_and_writable(dtype):
    zeros = lazy_zeros(3, 5, 7, dtype=dtype)
    assert zeros.shape == (3, 5, 7) and zeros.dtype == dtype and zeros.is_contiguous()
    assert not zeros.any()
    zeros[1] = 2
    assert zeros.sum() == 2 * 35
    assert zeros.data_ptr() % 64 == 0


def test_untouched_pages_take_no_memory():
    process = psutil.Process()
    before = process.memory_info().rss
    zeros = lazy_zeros(1 << 30, dtype=torch.bfloat16)
    assert process.memory_info().rss - before < 64 << 20
    del zeros
