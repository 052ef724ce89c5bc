"""Short causal convolutions on a device: those of the twin, the same bits however sequences are cut, and gradients."""

import random
from functools import partial

import pytest
import torch

from rollout_engine.kernels.convolution import causal_convolution
from rollout_engine.kernels.state_chunks import StateChunks
from rollout_engine.kernels.state_kernels import TokenKernel
from rollout_engine.kernels.triton import convolution
from tests.unit.kernels.test_convolution import DTYPES, SILU, formula, one

convolve = partial(causal_convolution, kernel=TokenKernel(convolution.convolve, convolution.find_gradients))
# Of the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


def draw(device, num_tokens, channels, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(channels)
    shapes = (num_tokens, channels), (channels, width), (channels,)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


@pytest.mark.quick(2)
@DTYPES
@SILU
@pytest.mark.parametrize(("channels", "width"), [(5, 4), (200, 3), (16, 1)])
def test_outputs_are_those_of_torchs_convolution(device, dtype, silu, channels, width):
    x, weight, bias = draw(device, 40, channels, width, dtype)
    lengths = [1, 30, 2, 7]
    for given in (bias, None):
        found = convolve(x, weight, given, silu=silu, chunks=StateChunks.whole(lengths))
        wanted = formula(x, weight, given, silu, lengths)
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), wanted, rtol=4 * torch.finfo(dtype).eps, atol=4e-6)
    turned = x.t().contiguous().t()
    assert torch.equal(convolve(turned, weight, None, silu=silu, chunks=StateChunks.whole(lengths)), found)


@pytest.mark.quick(1)
@DTYPES
@pytest.mark.parametrize(
    ("channels", "width"),
    [pytest.param(37, 4, marks=pytest.mark.slow), pytest.param(130, 3, marks=pytest.mark.slow), (16, 2)],
)
def test_any_cut_of_a_sequence_gives_the_same_bits(device, dtype, channels, width):
    x, weight, bias = draw(device, 23, channels, width, dtype)
    pool = torch.full((4, width - 1, channels), torch.nan, dtype=dtype, device=device)
    run = partial(convolve, weight=weight, bias=bias, silu=True)
    wanted = run(x, chunks=one(23, -1, {23: 3}), states=pool)
    assert torch.equal(run(x, chunks=StateChunks.whole([23])), wanted)
    assert torch.equal(pool[3], x[23 - width + 1 :])
    rng = random.Random(0)
    for sizes in ([1] * 23, [rng.randrange(1, 6) for _ in range(23)]):
        first, source, out = 0, -1, []
        for size in sizes:
            end, slot = min(first + size, 23), rng.randrange(3)
            if first == end:
                break
            out.append(run(x[first:end], chunks=one(end - first, source, {end - first: slot}), states=pool))
            first, source = end, slot
        assert torch.equal(torch.cat(out), wanted[:first])
        assert torch.equal(pool[source], x[first - width + 1 : first])


def test_a_chunk_writes_many_slots_and_the_one_that_it_reads(device):
    x, weight, _ = draw(device, 6, 9, 4)
    pool = torch.randn(6, 3, 9, generator=torch.Generator().manual_seed(0)).to(device)
    tail = pool[2].clone()
    inputs = torch.cat((tail, x[:4]))
    chunks = StateChunks([0, 4, 6], [2, 5], [0, 3, 4], [1, 2, 4, 6], [2, 0, 1, 5])
    other = torch.cat((pool[5], x[4:]))
    convolve(x, weight, None, silu=False, chunks=chunks, states=pool)
    for end, slot in ((1, 2), (2, 0), (4, 1)):
        assert torch.equal(pool[slot], inputs[end : end + 3])
    assert torch.equal(pool[5], other[2:5])


@SILU
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [1, 4])
def test_gradients_are_those_of_torchs_convolution(device, silu, has_bias, width):
    x, weight, bias = draw(device, 12, 7, width)
    lengths, given = [1, 6, 2, 3], [x, weight, *([bias] if has_bias else [])]
    grad = torch.randn(12, 7, generator=torch.Generator().manual_seed(1)).to(device)
    leaves = [each.clone().requires_grad_() for each in given]
    out = convolve(*leaves, *([] if has_bias else [None]), silu=silu, chunks=StateChunks.whole(lengths))
    found = torch.autograd.grad(out, leaves, grad)
    wide = [each.double().requires_grad_() for each in given]
    plain = formula(*wide, *([] if has_bias else [None]), silu, lengths)
    for mine, right in zip(found, torch.autograd.grad(plain, wide, grad.double()), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-5)
