"""The C++ attention: right against plain float64 attention, and the same bits however it is batched."""

import math
import random
from itertools import pairwise

import pytest
import torch

from rollout_engine.kernels import dense_attention
from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.cpu.attention import AttentionPlan, Chunk, KVLayer, attend_dense, supports
from rollout_engine.kernels.cpu.build import load_kernels

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="no C++ compiler here")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def draw(batch, heads, kv_heads, length, dk, dv, dtype=torch.float32):
    """q [B, H, T, Dk], k [B, Hk, T, Dk], v [B, Hk, T, Dv]."""
    shapes = [(batch, heads, length, dk), (batch, kv_heads, length, dk), (batch, kv_heads, length, dv)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def reference(q, k, v, params):
    """float64 attention of `draw`'s tensors: output [B, T, H, Dv], log-sum-exp [B, T, H]."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    position = torch.arange(q.shape[2])
    distance = position[:, None] - position
    hidden = (distance < 0) | (distance >= (params.sliding_window or len(position)))
    scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1).transpose(1, 2)


def paged(q, k, v, params, *, block_size, steps, shared=0, sinks=None):
    """The sequences of `draw` through a pool: every step is [(sequence, first, end)]; returns [B, T, H, Dv].

    The first `shared` positions of all sequences lie in the same blocks.
    """
    batch, heads, length, dk = q.shape
    num_shared, per_sequence = shared // block_size, -(-length // block_size)
    free = list(range(num_shared + batch * (per_sequence - num_shared)))
    random.Random(0).shuffle(free)
    common = [free.pop() for _ in range(num_shared)]
    tables = [common + [free.pop() for _ in range(per_sequence - num_shared)] for _ in range(batch)]
    layer = KVLayer(
        num_shared + batch * (per_sequence - num_shared),
        k.shape[1],
        dk,
        v.shape[-1],
        block_size=block_size,
        dtype=q.dtype,
    )
    for pool in (layer.keys, layer.values):
        pool.fill_(math.nan)  # what was never written must not be seen
    out = q.new_full((batch, length, heads, v.shape[-1]), math.nan)
    for step in steps:
        chunks = [Chunk(first, end - first, tables[s][: -(-end // block_size)]) for s, first, end in step]
        plan = AttentionPlan(chunks, block_size=block_size, num_kv_heads=k.shape[1])
        flat = [torch.cat([x[s, :, first:end] for s, first, end in step], 1).transpose(0, 1) for x in (q, k, v)]
        result = layer.attend(plan, *flat, params, sinks=sinks).split([end - first for _, first, end in step])
        for (s, first, end), part in zip(step, result, strict=True):
            out[s, first:end] = part
    return out


def random_steps(batch, length, rng):
    """All tokens of all sequences in uneven chunks, some of them single tokens, in steps that mix both."""
    cuts = []
    for s in range(batch):
        places = {0, length, *(rng.randrange(length) for _ in range(rng.randrange(5)))}
        singles = rng.randrange(length)
        places.update(range(singles, min(singles + 12, length)))
        cuts.append([(s, a, b) for a, b in pairwise(sorted(places))])
    while any(cuts):
        chosen = [c for c in cuts if c and rng.random() < 0.8]
        rng.shuffle(chosen)
        if chosen:
            yield [c.pop(0) for c in chosen]


SHAPES = [
    pytest.param((2, 4, 4, 150, 16, 16), AttentionParams(0.25), id="multi-head"),
    pytest.param((2, 8, 2, 130, 128, 128), AttentionParams(0.09), id="grouped, 128"),
    pytest.param((1, 7, 1, 70, 64, 64), AttentionParams(0.125), id="multi-query of 7"),
    pytest.param((1, 2, 2, 65, 256, 256), AttentionParams(0.06), id="256"),
    pytest.param((2, 6, 2, 65, 24, 40), AttentionParams(0.3), id="wider values"),
    pytest.param((2, 4, 1, 67, 80, 17), AttentionParams(0.11), id="odd values"),
    pytest.param((1, 2, 1, 66, 33, 100), AttentionParams(0.17), id="odd keys"),
    pytest.param((2, 4, 2, 200, 32, 32), AttentionParams(0.2, sliding_window=70), id="window over tiles"),
    pytest.param((2, 4, 2, 150, 32, 32), AttentionParams(0.2, sliding_window=5), id="window within a tile"),
    pytest.param((2, 4, 2, 90, 32, 32), AttentionParams(0.5, softcap=3.0), id="soft cap"),
    pytest.param((3, 4, 2, 1, 32, 32), AttentionParams(0.2), id="one token"),
]


@DTYPES
@pytest.mark.parametrize(("shape", "params"), SHAPES)
def test_values_are_those_of_plain_attention(shape, params, dtype):
    q, k, v = draw(*shape, dtype)
    out, lse = attend_dense(q, k, v, params)
    expected, expected_lse = reference(q, k, v, params)
    rounding = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.double(), expected, atol=rounding, rtol=rounding)
    torch.testing.assert_close(lse.double(), expected_lse, atol=5e-6, rtol=2e-6)


@pytest.mark.quick(9)
@DTYPES
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize(("shape", "params"), SHAPES)
def test_bits_do_not_depend_on_blocks_chunks_or_threads(shape, params, block_size, dtype, thread_count):
    tensors = draw(*shape, dtype)
    expected, _ = attend_dense(*tensors, params)
    rng = random.Random(block_size)
    for threads in (1, 2):
        thread_count(threads)
        steps = list(random_steps(shape[0], shape[3], rng))
        assert torch.equal(paged(*tensors, params, block_size=block_size, steps=steps), expected)


@pytest.mark.quick(8)
@DTYPES
@pytest.mark.parametrize("heads", [4, 16], ids=["18 rows", "72 rows"])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("block_size", [8, 16])
def test_bits_do_not_depend_on_reading_a_shared_prefix_once(block_size, window, heads, dtype, thread_count):
    thread_count(1)  # more would cut the group
    batch, length, prefix = 9, 200, 144
    q, k, v = draw(batch, heads, 2, length, 32, 32, dtype)
    k[:, :, :prefix], v[:, :, :prefix], q[:, :, :prefix] = k[:1, :, :prefix], v[:1, :, :prefix], q[:1, :, :prefix]
    params = AttentionParams(0.2, sliding_window=window)
    rng = random.Random(0)
    steps = [[(0, 0, prefix)]] + [[(s, prefix, rng.randrange(prefix + 1, length))] for s in range(batch)]
    position = [step[0][2] for step in steps[1:]]
    while min(position) < length:
        step = [(s, p, p + 1) for s, p in enumerate(position) if p < length]
        rng.shuffle(step)
        steps.append(step)
        position = [min(length, p + 1) for p in position]
    out = paged(q, k, v, params, block_size=block_size, steps=steps, shared=prefix)
    expected, _ = attend_dense(q, k, v, params)
    assert torch.equal(out[:, prefix:], expected[:, prefix:]) and torch.equal(out[0], expected[0])


@DTYPES
def test_bits_with_sinks_do_not_depend_on_chunks(dtype):
    tensors, sinks = draw(3, 4, 2, 150, 64, 64, dtype), torch.randn(4).to(dtype)
    expected, _ = attend_dense(*tensors, AttentionParams(0.1), sinks)
    steps = random_steps(3, 150, random.Random(0))
    assert torch.equal(paged(*tensors, AttentionParams(0.1), block_size=16, steps=steps, sinks=sinks), expected)
    assert not torch.equal(expected, attend_dense(*tensors, AttentionParams(0.1))[0])


def test_a_prefix_is_read_once_by_the_sequences_that_share_it():
    tile = list(range(4))  # of 16 positions each: one tile
    long = [*tile, *range(10, 18)]
    tables = [[*long, 30], [*tile, 31], [50, 51], [*long, 32], [*long, 33], [*tile, 34]]
    lengths = [200, 70, 20, 199, 198, 65]
    chunks = [Chunk(n - 1, 1, table) for table, n in zip(tables, lengths, strict=True)]
    assert groups(AttentionPlan(chunks, block_size=16, num_kv_heads=8)) == [({0, 3, 4}, 3), ({1, 5}, 1), ({2}, 0)]


def test_groups_are_cut_where_threads_would_go_without_work(thread_count):
    chunks = [Chunk(70, 1, [*range(4), 10 + i]) for i in range(12)]
    thread_count(2)
    assert [len(members) for members, _ in groups(AttentionPlan(chunks, block_size=16, num_kv_heads=8))] == [12]
    assert [len(members) for members, _ in groups(AttentionPlan(chunks, block_size=16, num_kv_heads=1))] == [3, 3, 3, 3]


def test_sequences_that_share_nothing_take_turns(thread_count):
    thread_count(1)
    shared = [Chunk(70, 1, [*range(4), 10 + i]) for i in range(2)]
    alone = [Chunk(70, 1, [100 + 5 * i + j for j in range(5)]) for i in range(20)]
    found = groups(AttentionPlan(shared + alone, block_size=16, num_kv_heads=8))
    assert [(len(members), tiles) for members, tiles in found] == [(2, 1), (8, 0), (8, 0), (4, 0)]
    thread_count(2)
    assert len(groups(AttentionPlan(alone, block_size=16, num_kv_heads=1))) == 4


@DTYPES
@pytest.mark.parametrize("window", [0, 20])
def test_bits_do_not_depend_on_turns(window, dtype, thread_count):
    thread_count(1)
    batch, length, params = 12, 150, AttentionParams(0.2, sliding_window=window)
    tensors, rng = draw(batch, 6, 2, length, 64, 64, dtype), random.Random(0)
    start = [rng.randrange(1, length) for _ in range(batch)]
    steps = [[(s, 0, start[s])] for s in range(batch)]
    for i in range(length):
        steps.append([(s, p + i, p + i + 1) for s, p in enumerate(start) if p + i < length])
    out = paged(*tensors, params, block_size=16, steps=[step for step in steps if step])
    assert torch.equal(out, attend_dense(*tensors, params)[0])


def groups(plan):
    """Per work item: (sequences, shared tiles)."""
    memory, count = plan._memory[-1].view(torch.int32).tolist(), plan._plan.num_sequences
    members, items = memory[:count], memory[count:]
    found = [items[5 * i : 5 * i + 5] for i in range(plan._plan.num_items)]
    return [(set(members[first : first + count]), shared) for first, count, _, _, shared in found]


def test_strided_inputs_are_read_where_they_lie():
    q, k, v = draw(2, 4, 2, 70, 32, 32)
    expected, _ = attend_dense(q, k, v, AttentionParams(0.2))
    wide = torch.randn(2, 70, 8, 32)
    wide[:, :, :4], wide[:, :, 4:6], wide[:, :, 6:] = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    parts = (x.transpose(1, 2) for x in wide.split([4, 2, 2], 2))
    assert torch.equal(attend_dense(*parts, AttentionParams(0.2))[0], expected)


def test_large_scores_neither_overflow_nor_vanish():
    q, k, v = draw(1, 2, 1, 130, 16, 16)
    q = q * 300
    out, lse = attend_dense(q, k, v, AttentionParams(1.0))
    expected, expected_lse = reference(q, k, v, AttentionParams(1.0))
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=1e-5)


def test_the_twin_serves_where_there_is_no_library(monkeypatch):
    tensors = draw(2, 4, 2, 100, 32, 32)
    ours = dense_attention.DenseAttention.apply(*tensors, AttentionParams(0.2))
    monkeypatch.setattr(dense_attention.compiled.build, "load_kernels", lambda: None)
    assert not supports(torch.float32)
    twins = dense_attention.DenseAttention.apply(*tensors, AttentionParams(0.2))
    torch.testing.assert_close(ours, twins, atol=2e-6, rtol=1e-5)


def test_dtypes_without_a_kernel_are_left_to_the_twin():
    assert supports(torch.bfloat16) and not supports(torch.float16) and not supports(torch.float64)
