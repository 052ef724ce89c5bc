"""A trainer's attention against torch's own attention: values, gradients, windows, soft caps."""

import math
import random

import pytest
import torch

from rollout_engine.kernels import dense_attention
from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.cpu.attention import attend_dense
from rollout_engine.kernels.cpu.attention_backward import attention_gradients
from rollout_engine.kernels.cpu.build import load_kernels
from rollout_engine.kernels.dense_attention import DenseAttention


@pytest.fixture(params=["kernel", "twin"], autouse=True)
def implementation(request, monkeypatch):
    """Run with the C++ kernel, and with its eager twin."""
    if request.param == "twin":
        monkeypatch.setattr(dense_attention.compiled, "supports", lambda dtype: False)
    elif load_kernels() is None:
        pytest.skip("no C++ compiler here")
    return request.param


def reference(q, k, v, params, sinks=None):
    """Plain attention in the inputs' dtype: q [B, H, T, Dk] -> [B, T, H, Dv]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    position = torch.arange(q.shape[2])
    distance = position[:, None] - position
    hidden = distance < 0
    if params.sliding_window:
        hidden = hidden | (distance >= params.sliding_window)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : len(position)] @ v).transpose(1, 2)


CASES = [
    pytest.param(4, 4, 150, 16, 16, AttentionParams(0.25), id="multi-head"),
    pytest.param(6, 2, 65, 24, 24, AttentionParams(0.3), id="grouped"),
    pytest.param(4, 1, 64, 16, 8, AttentionParams(0.25), id="multi-query, narrower values"),
    pytest.param(4, 2, 200, 16, 16, AttentionParams(0.25, sliding_window=70), id="window over tiles"),
    pytest.param(4, 2, 90, 16, 16, AttentionParams(0.25, sliding_window=5), id="window within a tile"),
    pytest.param(4, 2, 90, 16, 16, AttentionParams(0.5, softcap=3.0), id="soft cap"),
    pytest.param(2, 2, 1, 16, 16, AttentionParams(0.25), id="one token"),
]


@pytest.mark.parametrize(("heads", "kv_heads", "length", "dk", "dv", "params"), CASES)
def test_values_and_gradients_are_attentions(heads, kv_heads, length, dk, dv, params):
    shapes = [(3, heads, length, dk), (3, kv_heads, length, dk), (3, kv_heads, length, dv)]
    ours = [torch.randn(shape, requires_grad=True) for shape in shapes]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    out, expected = DenseAttention.apply(*ours, params), reference(*theirs, params)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad.double(), right.grad, atol=1e-5, rtol=1e-4)


def test_sinks_take_their_share_and_get_their_gradient():
    shapes = [(2, 6, 90, 16), (2, 2, 90, 16), (2, 2, 90, 24), (6,)]
    ours = [torch.randn(shape, requires_grad=True) for shape in shapes]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    params = AttentionParams(0.3, sliding_window=20)
    out = DenseAttention.apply(*ours[:3], params, ours[3])
    expected = reference(*theirs[:3], params, theirs[3])
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad.double(), right.grad, atol=2e-5, rtol=1e-4)


def test_a_token_does_not_depend_on_what_follows_or_stands_beside_it(thread_count):
    q, k, v = (torch.randn(5, heads, 200, 16) for heads in (6, 2, 2))
    params = AttentionParams(0.25)
    thread_count(2)
    whole = DenseAttention.apply(q, k, v, params)
    for threads in (1, 2):
        thread_count(threads)
        for length in (1, 2, 63, 64, 65, 131, 199):
            part = DenseAttention.apply(q[1:3, :, :length], k[1:3, :, :length], v[1:3, :, :length], params)
            assert torch.equal(part, whole[1:3, :length])


def test_gradients_do_not_depend_on_threads_or_on_what_stands_beside_them(implementation, thread_count):
    if implementation == "twin":
        pytest.skip("torch's products may round differently in another batch")
    params = AttentionParams(0.25)
    packed = [torch.randn(1, heads, sum(LENGTHS), 16) for heads in (6, 2, 2)]
    out_grad = torch.randn(1, sum(LENGTHS), 6, 16)

    def gradients(first, end, lengths):
        leaves = [x[:, :, first:end].detach().requires_grad_() for x in packed]
        DenseAttention.apply(*leaves, params, None, None, lengths).backward(out_grad[:, first:end])
        return [x.grad for x in leaves]

    thread_count(2)
    together = gradients(0, sum(LENGTHS), LENGTHS)
    for threads in (1, 2):
        thread_count(threads)
        start = 0
        for length in LENGTHS:
            for alone, whole in zip(gradients(start, start + length, None), together, strict=True):
                assert torch.equal(alone, whole[:, :, start : start + length])
            start += length


@pytest.mark.quick(1)
@pytest.mark.skipif(load_kernels() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_any_shape_are_those_of_the_twin(dtype):
    rng = random.Random(0)
    for _ in range(40):
        kv_heads, group = rng.choice([(1, 1), (2, 3), (3, 1), (1, 72), (2, 8)])
        dk, dv = rng.choice([(16, 16), (5, 33), (48, 7), (64, 64), (96, 20)])
        lengths = [rng.choice([1, 2, 31, 63, 64, 65, 130]) for _ in range(rng.randrange(1, 5))]
        params = AttentionParams(dk**-0.5, rng.choice([0, 0, 1, 9, 64, 100]), softcap=rng.choice([0.0, 0.0, 2.0]))
        strided = [torch.randn(1, sum(lengths), n, d + 3).to(dtype) for n, d in (
            (kv_heads * group, dk), (kv_heads, dk), (kv_heads, dv), (kv_heads * group, dv)
        )]  # fmt: skip
        q, k, v = (x[..., 3:].transpose(1, 2) for x in strided[:3])
        out, lse = attend_dense(q, k, v, params, None, lengths)
        given = (q, k, v, out, lse, strided[3][..., 3:])
        mine = attention_gradients(*given, params, lengths)
        exact = given if dtype == torch.float32 else [x.double() for x in given]
        for found, right in zip(mine, dense_attention._attention_gradients(*exact, params, lengths), strict=True):
            torch.testing.assert_close(found, right.float(), atol=1e-5 * float(right.abs().max() + 1), rtol=1e-4)


LENGTHS = [65, 1, 200, 1, 34, 99]


@pytest.mark.quick(8)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "params", [AttentionParams(0.25), AttentionParams(0.25, sliding_window=20), AttentionParams(0.5, softcap=3.0)]
)
def test_packed_sequences_are_computed_as_if_each_were_alone(rows, params):
    total = sum(LENGTHS)
    packed = [torch.randn(rows, heads, total // rows, 16, requires_grad=True) for heads in (6, 2, 2)]
    sinks = torch.randn(6, requires_grad=True)
    alone_sinks = sinks.detach().clone().requires_grad_()
    out = DenseAttention.apply(*packed, params, sinks, None, LENGTHS)
    grad = torch.randn_like(out)
    out.backward(grad)
    flat = [x.detach().transpose(1, 2).flatten(0, 1) for x in packed]
    grads = [x.grad.transpose(1, 2).flatten(0, 1) for x in packed]
    start = 0
    for length in LENGTHS:
        part = slice(start, start + length)
        alone = [x[part].transpose(0, 1)[None].requires_grad_() for x in flat]
        expected = DenseAttention.apply(*alone, params, alone_sinks)
        assert torch.equal(out.flatten(0, 1)[part], expected[0])
        expected.backward(grad.flatten(0, 1)[part][None])
        for mine, right in zip(grads, alone, strict=True):
            torch.testing.assert_close(mine[part], right.grad[0].transpose(0, 1), atol=1e-5, rtol=1e-4)
        start += length
    torch.testing.assert_close(sinks.grad, alone_sinks.grad, atol=1e-4, rtol=1e-4)
