"""Lazily committed zeros, and releasing their pages."""

import psutil
import pytest
import torch

from rollout_engine.kernels.memory import lazy_zeros, release_pages, resident_bytes


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


@pytest.mark.quick(1)
@pytest.mark.parametrize("make", [lazy_zeros, torch.ones])
def test_what_is_given_back_is_free_keeps_its_address_and_can_be_written_again(make):
    process = psutil.Process()
    tensor = make(1 << 26, dtype=torch.float32)
    tensor.fill_(7)
    view, address = tensor[1 << 20 :].view(-1, 1 << 20), tensor.data_ptr()
    full = process.memory_info().rss
    release_pages([tensor, view])
    assert full - process.memory_info().rss > 250 << 20
    assert tensor.data_ptr() == address
    pages = tensor[4096:-4096]
    assert not pages.any()
    view.fill_(3)
    assert tensor[-1] == 3 and process.memory_info().rss > full - (16 << 20)


def test_neighbours_of_what_is_given_back_keep_their_values():
    small = [torch.full((700,), float(i)) for i in range(64)]
    release_pages(small[::2])
    assert all((tensor == i).all() for i, tensor in enumerate(small) if i % 2)


@pytest.mark.parametrize("function", [release_pages, resident_bytes])
def test_tensors_elsewhere_are_refused(function):
    with pytest.raises(ValueError, match="on the CPU, and one is on meta"):
        function([torch.zeros(9), torch.zeros(9, device="meta")])
