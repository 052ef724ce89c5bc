"""Short causal convolutions: right, the same bits however sequences are cut and batched, and differentiable."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rollout_engine.kernels.convolution import causal_convolution
from rollout_engine.kernels.state_chunks import StateChunks

pytestmark = pytest.mark.usefixtures("side")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SILU = pytest.mark.parametrize("silu", [False, True], ids=["plain", "silu"])


def draw(num_tokens, channels, width, dtype=torch.float32):
    shapes = (num_tokens, channels), (channels, width), (channels,)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def formula(x, weight, bias, silu, lengths):
    """torch's convolution of each sequence, in float64."""
    x, weight, bias = x.double(), weight.double(), None if bias is None else bias.double()
    before, out = weight.shape[1] - 1, []
    for rows in x.split(lengths):
        padded = F.pad(rows.t()[None], (before, 0))
        out.append(F.conv1d(padded, weight[:, None], bias, groups=len(weight))[0].t())
    out = torch.cat(out)
    return F.silu(out) if silu else out


def one(length, source, writes):
    return StateChunks([0, length], [source], [0, len(writes)], list(writes), list(writes.values()))


@pytest.mark.quick(17)
@DTYPES
@SILU
@pytest.mark.parametrize(("channels", "width"), [(5, 4), (128, 3), (200, 4), (16, 1)])
def test_outputs_are_those_of_torchs_convolution(dtype, silu, channels, width):
    x, weight, bias = draw(20, channels, width, dtype)
    lengths = [1, 12, 2, 5]
    for given in (bias, None):
        found = causal_convolution(x, weight, given, silu=silu, chunks=StateChunks.whole(lengths))
        wanted = formula(x, weight, given, silu, lengths)
        assert found.dtype is dtype and found.is_contiguous()
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), wanted, rtol=4 * eps, atol=16 * torch.finfo(torch.float32).eps)


def test_a_result_is_rounded_once():
    x, weight, bias = draw(9, 40, 4, torch.bfloat16)
    chunks = StateChunks.whole([9])
    wide = causal_convolution(x.float(), weight.float(), bias.float(), silu=True, chunks=chunks)
    assert torch.equal(causal_convolution(x, weight, bias, silu=True, chunks=chunks), wide.bfloat16())


@pytest.mark.quick(12)
@DTYPES
@SILU
@pytest.mark.parametrize(("channels", "width"), [(37, 4), (130, 3), (16, 1)])
def test_any_cut_of_a_sequence_gives_the_same_bits(dtype, silu, channels, width):
    x, weight, bias = draw(23, channels, width, dtype)
    pool = torch.full((4, width - 1, channels), torch.nan, dtype=dtype)
    wanted = causal_convolution(x, weight, bias, silu=silu, chunks=one(23, -1, {23: 3}), states=pool)
    assert torch.equal(causal_convolution(x, weight, bias, silu=silu, chunks=StateChunks.whole([23])), wanted)
    assert torch.equal(pool[3], x[23 - width + 1 :])
    rng = random.Random(0)
    for sizes in ([1] * 23, *([rng.randrange(1, 6) for _ in range(23)] for _ in range(4))):
        first, source, out = 0, -1, []
        for size in sizes:
            end, slot = min(first + size, 23), rng.randrange(3)
            if first == end:
                break
            chunks = one(end - first, source, {end - first: slot})
            out.append(causal_convolution(x[first:end], weight, bias, silu=silu, chunks=chunks, states=pool))
            first, source = end, slot
        assert torch.equal(torch.cat(out), wanted[:first])
        if first >= width - 1:
            assert torch.equal(pool[source], x[first - width + 1 : first])


@DTYPES
def test_a_sequence_has_the_same_bits_in_any_batch_and_thread_count(thread_count, dtype):
    x, weight, bias = draw(140, 300, 4, dtype)
    lengths = [1, 100, 1, 3, 35]
    wanted = causal_convolution(x, weight, bias, silu=True, chunks=StateChunks.whole(lengths))
    for threads in (1, 2):
        thread_count(threads)
        assert torch.equal(causal_convolution(x, weight, bias, silu=True, chunks=StateChunks.whole(lengths)), wanted)
        for rows, out in zip(x.split(lengths), wanted.split(lengths), strict=True):
            alone = causal_convolution(rows, weight, bias, silu=True, chunks=StateChunks.whole([len(rows)]))
            assert torch.equal(alone, out)


def test_writes_inside_a_chunk_and_over_its_source_keep_the_inputs_before_them():
    x, weight, bias = draw(5, 20, 4)
    pool = torch.randn(5, 3, 20)
    rows = torch.cat((pool[4], x))
    wanted = causal_convolution(x, weight, bias, silu=True, chunks=one(5, 4, {}), states=pool)
    writes = {1: 4, 2: 0, 4: 1, 5: 2}
    found = causal_convolution(x, weight, bias, silu=True, chunks=one(5, 4, writes), states=pool)
    assert torch.equal(found, wanted)
    for number, slot in writes.items():
        assert torch.equal(pool[slot], rows[number : number + 3])


def test_forks_read_one_slot():
    x, weight, bias = draw(3, 20, 4)
    pool = torch.randn(3, 3, 20)
    before = pool[1].clone()
    chunks = StateChunks([0, 1, 3], [1, 1], [0, 1, 2], [1, 3], [0, 2])
    found = causal_convolution(x, weight, bias, silu=False, chunks=chunks, states=pool)
    assert torch.equal(pool[1], before)
    assert torch.equal(pool[0], torch.cat((before, x[:1]))[-3:])
    assert torch.equal(pool[2], torch.cat((before, x[1:]))[-3:])
    alone = causal_convolution(x[1:], weight, bias, silu=False, chunks=one(2, 1, {}), states=pool)
    assert torch.equal(found[1:], alone)


def test_inputs_with_other_strides_are_read():
    x, weight, bias = draw(12, 30, 4)
    chunks, wide = StateChunks.whole([12]), torch.randn(12, 50)
    wanted = causal_convolution(wide[:, 7:37].contiguous(), weight, bias, silu=True, chunks=chunks)
    for view in (wide[:, 7:37], wide[:, 7:37].t().contiguous().t()):
        assert torch.equal(causal_convolution(view, weight, bias, silu=True, chunks=chunks), wanted)
    turned = causal_convolution(x, weight.t().contiguous().t(), bias, silu=True, chunks=chunks)
    assert torch.equal(turned, causal_convolution(x, weight, bias, silu=True, chunks=chunks))


def test_no_tokens_give_no_outputs():
    x, weight, bias = draw(0, 8, 4)
    for lengths in ([], [0]):
        out = causal_convolution(x, weight, bias, silu=True, chunks=StateChunks.whole(lengths))
        assert out.shape == (0, 8)


@SILU
@pytest.mark.parametrize("has_bias", [True, False])
def test_gradients_are_those_of_torchs_convolution(silu, has_bias):
    x, weight, bias = draw(70, 20, 4)
    lengths, grad = [40, 1, 2, 27], torch.randn(70, 20)
    leaves = [each.requires_grad_() for each in (x, weight, *[bias] * has_bias)]
    out = causal_convolution(x, weight, bias if has_bias else None, silu=silu, chunks=StateChunks.whole(lengths))
    found = torch.autograd.grad(out, leaves, grad)
    wide = [each.detach().double().requires_grad_() for each in leaves]
    wanted = torch.autograd.grad(
        formula(wide[0], wide[1], wide[2] if has_bias else None, silu, lengths), wide, grad.double()
    )
    for mine, right in zip(found, wanted, strict=True):
        assert (mine.double() - right).abs().max() <= 1e-5 * right.abs().max()


def test_gradients_of_bfloat16_are_rounded_once():
    leaves = [each.requires_grad_() for each in draw(30, 20, 4, torch.bfloat16)]
    wide = [each.detach().float().requires_grad_() for each in leaves]
    grad, chunks = torch.randn(30, 20).bfloat16(), StateChunks.whole([20, 10])
    found = torch.autograd.grad(causal_convolution(*leaves, silu=False, chunks=chunks), leaves, grad)
    wanted = torch.autograd.grad(causal_convolution(*wide, silu=False, chunks=chunks), wide, grad.float())
    for mine, right in zip(found, wanted, strict=True):
        assert torch.equal(mine, right.bfloat16())


def test_gradients_of_some_inputs_only_are_found():
    x, weight, bias = draw(9, 20, 4)
    weight.requires_grad_()
    causal_convolution(x, weight, bias, silu=True, chunks=StateChunks.whole([9])).sum().backward()
    assert weight.grad.abs().sum() > 0 and x.grad is None


def test_what_does_not_fit_is_refused():
    x, weight, bias = draw(6, 20, 4)
    chunks, pool = one(6, -1, {6: 1}), torch.zeros(2, 3, 20)
    wrong = [
        ("x should be", (x[0], weight, bias, chunks, pool)),
        ("weight should be", (x, weight[:9], bias, chunks, pool)),
        ("weight should be", (x, weight[:, :0], bias, chunks, pool)),
        ("bias should be", (x, weight, bias[:9], chunks, pool)),
        ("states should be", (x, weight, bias, chunks, pool[:, :2])),
        ("states should be", (x, weight, bias, chunks, pool.bfloat16())),
        ("states should be", (x, weight, bias, chunks, torch.zeros(2, 20, 3).mT)),
        ("below 1", (x, weight, bias, chunks, pool[:1])),
        ("pass `states` too", (x, weight, bias, chunks, None)),
        ("chunks should have 5 tokens", (x[:5], weight, bias, chunks, pool)),
        ("has no gradients", (x.clone().requires_grad_(), weight, bias, chunks, pool)),
    ]
    for message, (x, weight, bias, chunks, pool) in wrong:
        with pytest.raises(ValueError, match=message):
            causal_convolution(x, weight, bias, silu=False, chunks=chunks, states=pool)
    with pytest.raises(ValueError, match="write_ends"):
        StateChunks(np.array([0, 6]), [-1], [0, 1], [7], [0])
