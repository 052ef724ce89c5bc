"""The streaming copy moves exactly the given bytes, and finds the largest bit pattern anywhere."""

import pytest
import torch

from rollout_engine.kernels.cpu.stream import streaming_copy

WIDTHS = {torch.int8: 1, torch.int16: 2, torch.int32: 4, torch.int64: 8}
SIZES = [0, 1, 31, 64, 65, 1000, 70_001]
"""Numbers of elements around the ends of a cache line."""

pytestmark = pytest.mark.skipif(streaming_copy() is None, reason="the C++ kernels cannot be built here")


def random_bits(size, dtype):
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (size,), dtype=dtype, generator=torch.Generator().manual_seed(size))


@pytest.mark.quick(12)
@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("out_start", "source_start"), [(0, 0), (3, 0), (0, 5), (7, 2)])
def test_every_element_and_no_other_is_copied_and_the_largest_magnitude_is_found(dtype, size, out_start, source_start):
    width = WIDTHS[dtype]
    source = random_bits(size + source_start, dtype)[source_start:]
    around = random_bits(size + out_start + 9, dtype)
    expected = torch.cat([around[:out_start], source, around[out_start + size :]])
    largest = streaming_copy()(around.data_ptr() + out_start * width, source.data_ptr(), size * width, width)
    assert torch.equal(around, expected)
    assert largest == max((int(x) & torch.iinfo(dtype).max for x in source), default=0)


@pytest.mark.parametrize("dtype", WIDTHS)
def test_one_large_value_is_found_wherever_it_is(dtype):
    for size in (5, 64, 200):
        for where in range(size):
            source, out = torch.ones(size, dtype=dtype), torch.zeros(size + 1, dtype=dtype)
            source[where] = -3  # all bits but the second
            width = WIDTHS[dtype]
            largest = streaming_copy()(out[1:].data_ptr(), source.data_ptr(), size * width, width)
            assert largest == torch.iinfo(dtype).max - 2


@pytest.mark.parametrize(("num_bytes", "width"), [(8, 3), (7, 4), (-8, 4), (8, 0)])
def test_bytes_that_are_no_whole_elements_are_refused(num_bytes, width):
    source, out = torch.zeros(8), torch.zeros(8)
    with pytest.raises(ValueError, match=f"{num_bytes} bytes .* of {width}"):
        streaming_copy()(out.data_ptr(), source.data_ptr(), num_bytes, width)
    with pytest.raises(ValueError, match="from address 0x0"):
        streaming_copy()(out.data_ptr(), 0, 4, 4)
