"""Queries that see past their own position: values, gradients, and bits of chunks, blocks, packed rows and threads."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from rollout_engine.kernels import dense_attention
from rollout_engine.kernels.attention_params import AttentionParams, Reach
from rollout_engine.kernels.cpu.attention import AttentionPlan, Chunk, KVLayer, attend_dense
from rollout_engine.kernels.cpu.build import load_kernels
from rollout_engine.kernels.dense_attention import DenseAttention
from rollout_engine.model.cpu.eager_attention import EagerPool
from rollout_engine.model.cpu.flat_batch import FlatBatch, SequenceChunk
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.pictures.reach import reach_of, reach_of_chunk

SPANS = [[(3, 20), (60, 140)], [(0, 5), (64, 65), (127, 129)], []]
LENGTH = 150
PARAMS = [
    pytest.param(AttentionParams(0.2), id="all"),
    pytest.param(AttentionParams(0.2, sliding_window=7), id="window within a picture"),
    pytest.param(AttentionParams(0.3, sliding_window=90, softcap=3.0), id="wide window, cap"),
]
needs_compiler = pytest.mark.skipif(load_kernels() is None, reason="no C++ compiler here")


def reach_of_spans(spans=SPANS, length=LENGTH):
    """int32 [B, length]."""
    found = torch.zeros(len(spans), length, dtype=torch.int32)
    for row, own in enumerate(spans):
        for start, end in own:
            found[row, start:end] = torch.arange(end - start).flip(0)
    return found


def draw(dtype=torch.float32, heads=4, kv_heads=2, dk=32, dv=32):
    generator = torch.Generator().manual_seed(1)
    shapes = [(heads, dk), (kv_heads, dk), (kv_heads, dv)]
    return [torch.randn(len(SPANS), n, LENGTH, dim, generator=generator).to(dtype) for n, dim in shapes]


def reference(q, k, v, params, reach):
    """Plain attention in the inputs' dtype: [B, T, H, Dv]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    at = torch.arange(q.shape[2])
    hidden = at > (at + reach)[:, None, :, None]
    if params.sliding_window:
        hidden = hidden | (at[:, None] - at >= params.sliding_window)
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("implementation", [pytest.param("kernel", marks=needs_compiler), "twin"])
@pytest.mark.parametrize("params", PARAMS)
def test_values_and_gradients_are_attentions(implementation, params, monkeypatch):
    if implementation == "twin":
        monkeypatch.setattr(dense_attention.compiled, "supports", lambda dtype: False)
    ours, reach = [x.requires_grad_() for x in draw()], reach_of_spans()
    theirs = [x.detach().double().requires_grad_() for x in ours]
    out = DenseAttention.apply(*ours, params, None, None, None, reach)
    expected = reference(*theirs, params, reach)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(out, DenseAttention.apply(*ours, params)), "the negative control"
    grad = torch.randn(out.shape)
    out.backward(grad)
    expected.backward(grad.double())
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad.double(), right.grad, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("implementation", [pytest.param("kernel", marks=needs_compiler), "twin"])
def test_packed_rows_have_the_bits_and_gradients_of_rows(implementation, monkeypatch):
    if implementation == "twin":
        monkeypatch.setattr(dense_attention.compiled, "supports", lambda dtype: False)
    params, reach, tensors = AttentionParams(0.2, sliding_window=40), reach_of_spans(), draw()
    rows = [x.clone().requires_grad_() for x in tensors]
    packed = [x.transpose(0, 1).flatten(1, 2)[None].contiguous().requires_grad_() for x in tensors]
    out = DenseAttention.apply(*rows, params, None, None, None, reach)
    other = DenseAttention.apply(*packed, params, None, None, [LENGTH] * len(SPANS), reach.view(1, -1))
    assert torch.equal(other.view(out.shape), out)
    for each in (out, other):
        each.square().sum().backward()
    for one, two in zip(rows, packed, strict=True):
        assert torch.equal(two.grad[0].unflatten(1, (len(SPANS), LENGTH)).transpose(0, 1), one.grad)


def chunks_around(spans, rng):
    """Edges of chunks of a sequence that split no span, single tokens among them."""
    allowed = [at for at in range(1, LENGTH) if not any(a < at < b for a, b in spans)]
    edges = sorted({0, LENGTH, *rng.sample(allowed, 6)})
    return list(pairwise(edges))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 32, 32), (2, 1, 64, 128)], ids=str)
def test_chunks_over_blocks_have_the_bits_of_whole_sequences(heads, dtype, thread_count):
    q, k, v = draw(dtype, *heads)
    reach = reach_of_spans()
    for (params,), block_size, threads in zip((each.values for each in PARAMS), (4, 16, 64), (1, 2, 1), strict=True):
        thread_count(threads)
        expected, _ = attend_dense(q, k, v, params, None, None, reach)
        rng, num_blocks = random.Random(block_size), -(-LENGTH // block_size)
        layer = KVLayer(3 * num_blocks, heads[1], heads[2], heads[3], block_size=block_size, dtype=dtype)
        for pool in (layer.keys, layer.values):
            pool.fill_(math.nan)
        tables = np.array(rng.sample(range(3 * num_blocks), 3 * num_blocks)).reshape(3, -1).tolist()
        left = [chunks_around(spans, rng) for spans in SPANS]
        while any(left):
            step = [(s, *left[s].pop(0)) for s in range(3) if left[s] and rng.random() < 0.8]
            if not step:
                continue
            plan = AttentionPlan([Chunk(a, b - a, tables[s]) for s, a, b in step], block_size=block_size, num_kv_heads=2)
            flat = [torch.cat([x[s, :, a:b] for s, a, b in step], 1).transpose(0, 1) for x in (q, k, v)]
            seen = torch.cat([reach[s, a:b] for s, a, b in step])
            parts = layer.attend(plan, *flat, params, reach=seen).split([b - a for _, a, b in step])
            for (s, a, b), part in zip(step, parts, strict=True):
                assert torch.equal(part, expected[s, a:b])


def test_the_eager_twin_over_blocks_sees_what_the_dense_twin_sees(monkeypatch):
    monkeypatch.setattr(dense_attention.compiled, "supports", lambda dtype: False)
    q, k, v = draw()
    geometry = LayerGeometry(4, 2, 32, 32, scale=0.2, sliding_window=None, softcap=None, has_sinks=False)
    for params in (AttentionParams(0.2), AttentionParams(0.2, sliding_window=7)):
        reach, pool = reach_of_spans(), EagerPool([geometry], num_blocks=30, block_size=16, dtype=torch.float32)
        expected = reference(q, k, v, params, reach)
        tables = [list(range(10 * s, 10 * s + 10)) for s in range(3)]
        for first, end in ((0, 60), (60, 140), (140, 150)):
            step = [SequenceChunk([0] * (end - first), first, tables[s]) for s in range(3)]
            flat = [x[:, :, first:end].transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
            batch = FlatBatch.of(step)._replace(reach=Reach(reach[:, first:end].flatten()))
            out = pool.step(batch).attend(0, *flat, params).view(3, end - first, 4, 32)
            torch.testing.assert_close(out, expected[:, first:end], atol=1e-5, rtol=1e-5)


@needs_compiler
def test_a_reach_beyond_its_chunk_is_refused():
    layer = KVLayer(2, 1, 16, 16, block_size=16, dtype=torch.float32)
    q = torch.zeros(5, 1, 16)
    plan = AttentionPlan([Chunk(0, 3, [0]), Chunk(0, 2, [1])], block_size=16, num_kv_heads=1)
    for wrong, place in (([0, 2, 0, 0, 0], 1), ([0, 0, 0, 0, 1], 4), ([-1, 0, 0, 0, 0], 0), ([2, 0, 0, 0, 0], 1)):
        with pytest.raises(ValueError, match=rf"reach\[{place}\] is"):
            layer.attend(plan, q, q, q, AttentionParams(0.2), reach=torch.tensor(wrong, dtype=torch.int32))
    with pytest.raises(ValueError, match="reach should be a torch.int32 tensor"):
        layer.attend(plan, q, q, q, AttentionParams(0.2), reach=torch.zeros(5))
    layer.attend(plan, q, q, q, AttentionParams(0.2), reach=torch.tensor([2, 1, 0, 1, 0], dtype=torch.int32))


def test_runs_of_placeholders_reach_their_ends():
    assert reach_of(np.array([3, 4, 5, 9, 11, 12])).tolist() == [2, 1, 0, 0, 1, 0]
    places = [np.array([3, 4, 5]), np.array([8, 9])]
    assert reach_of_chunk(places, 2, 9).tolist() == [0, 2, 1, 0, 0, 0, 1, 0, 0]
    with pytest.raises(ValueError, match=r"Tokens \[2, 5\) of a sequence end inside a picture"):
        reach_of_chunk(places, 2, 3)


def test_a_reach_in_windows_alone_is_not_that_of_other_layers():
    tokens = torch.tensor([1, 0])
    wide, windowed = AttentionParams(1.0), AttentionParams(1.0, sliding_window=4)
    assert Reach(tokens).of(wide) is Reach(tokens).of(windowed) is tokens
    assert Reach(tokens, True).of(wide) is None and Reach(tokens, True).of(windowed) is tokens
