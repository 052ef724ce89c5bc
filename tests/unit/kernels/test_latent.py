"""Attention over latents: the products around it, and the pool that holds them in place of keys and values."""

import math
import random

import pytest
import torch
import torch.nn.functional as F

from rollout_engine.kernels import dense_attention, latent
from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.cpu import attention, build, gemm
from rollout_engine.kernels.cpu.attention import AttentionPlan, Chunk, KVLayer, attend_dense, num_parts
from rollout_engine.kernels.cpu.attention_backward import attention_gradients

needs_compiler = pytest.mark.skipif(build.load_kernels() is None, reason="no C++ compiler here")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SIZES = pytest.mark.parametrize(
    ("heads", "nope", "rope", "value", "rank"), [(4, 16, 8, 12, 16), (3, 5, 3, 7, 19), (2, 128, 64, 128, 96)]
)
COUNTS = (1, 2, 3, 4, 5, 8, 33)


@pytest.fixture(params=["compiled", "eager"])
def kernels(request, monkeypatch):
    if request.param == "compiled" and build.load_kernels() is None:
        pytest.skip("no C++ compiler here")
    if request.param == "eager":
        monkeypatch.setattr(latent.compiled, "supports", lambda *tensors: False)


def draw(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@SIZES
def test_products_are_right_and_rows_do_not_depend_on_one_another(kernels, dtype, heads, nope, rope, value, rank):
    weight = draw(heads, nope + value, rank, dtype=dtype) / rank**0.5
    q, x = draw(41, heads, nope + rope, dtype=dtype, seed=1), draw(41, heads, rank, dtype=dtype, seed=2)
    absorbed, expanded = latent.absorb(q, weight, nope), latent.expand(x, weight, nope)
    wanted = torch.einsum("thn,hnr->thr", q[..., :nope].double(), weight[:, :nope].double())
    tolerance = 32 * torch.finfo(dtype).eps
    torch.testing.assert_close(absorbed[..., :rank].double(), wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(absorbed[..., rank:], q[..., nope:])
    wanted = torch.einsum("thr,hvr->thv", x.double(), weight[:, nope:].double())
    torch.testing.assert_close(expanded.double(), wanted, rtol=tolerance, atol=tolerance)
    for first, count in enumerate(COUNTS):
        part = slice(first, first + count)
        assert torch.equal(latent.absorb(q[part], weight, nope), absorbed[part])
        assert torch.equal(latent.expand(x[part], weight, nope), expanded[part])
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)  # other strides
    assert torch.equal(latent.absorb(by_head, weight, nope), absorbed)
    one = slice(heads - 1, heads)  # as on a rank
    assert torch.equal(latent.absorb(q[:, one], weight[one], nope), absorbed[:, one])
    assert torch.equal(latent.expand(x[:, one], weight[one], nope), expanded[:, one])


def pack_heads(weight, nope):
    """The kernels of `absorb` and `expand` by packed operands, as `HeadGroup` makes these."""
    parts = weight[:, :nope].mT, weight[:, nope:]
    packed = [gemm.pack(F.pad(part, (0, 0, 0, -part.shape[1] % gemm.PANEL)).flatten(0, 1)) for part in parts]
    return latent.absorb_packed(packed[0]), latent.expand_packed(packed[1])


@needs_compiler
@DTYPES
@SIZES
def test_packed_products_are_right_and_rows_do_not_depend_on_one_another(dtype, heads, nope, rope, value, rank):
    weight = draw(heads, nope + value, rank, dtype=dtype) / rank**0.5
    before, after = pack_heads(weight, nope)
    q, x = draw(300, heads, nope + rope, dtype=dtype, seed=1), draw(300, heads, rank, dtype=dtype, seed=2)
    absorbed, expanded = latent.absorb(q, weight, nope, before), latent.expand(x, weight, nope, after)
    tolerance = 32 * torch.finfo(dtype).eps
    torch.testing.assert_close(absorbed, latent.absorb(q, weight, nope), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(expanded, latent.expand(x, weight, nope), rtol=tolerance, atol=tolerance)
    assert torch.equal(absorbed[..., rank:], q[..., nope:])
    for first, count in enumerate((*COUNTS, 257)):
        part = slice(first, first + count)
        assert torch.equal(latent.absorb(q[part], weight, nope, before), absorbed[part])
        assert torch.equal(latent.expand(x[part], weight, nope, after), expanded[part])
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)  # other strides
    assert torch.equal(latent.absorb(by_head, weight, nope, before), absorbed)
    one = slice(heads - 1, heads)  # as on a rank
    of_one = pack_heads(weight[one], nope)
    assert torch.equal(latent.absorb(q[:, one], weight[one], nope, of_one[0]), absorbed[:, one])
    assert torch.equal(latent.expand(x[:, one], weight[one], nope, of_one[1]), expanded[:, one])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(latent.absorb(q, weight, nope, before), absorbed)
            assert torch.equal(latent.expand(x, weight, nope, after), expanded)
    finally:
        torch.set_num_threads(threads)
    assert latent.absorb(q[:0], weight, nope, before).shape == (0, heads, rank + rope)


@needs_compiler
def test_packed_products_refuse_other_weights():
    weight, q = draw(3, 30, 19, dtype=torch.float32), draw(9, 3, 20, dtype=torch.float32, seed=1)
    before, after = pack_heads(weight, 17)
    with pytest.raises(ValueError, match="x should be torch.float32 .* like the weight"):
        latent.absorb(q.bfloat16(), weight, 17, before)
    with pytest.raises(ValueError, match="x should be torch.float32"):
        latent.absorb(q, weight, 17, after)
    with pytest.raises(ValueError, match="the panels of 2 matrices of 19 rows"):
        latent.absorb(q[:, :2], weight, 17, before)


@needs_compiler
@DTYPES
def test_both_kernels_agree(monkeypatch, dtype):
    weight, q = draw(3, 30, 19, dtype=dtype), draw(9, 3, 20, dtype=dtype, seed=1)
    x = draw(9, 3, 19, dtype=dtype, seed=2)
    ours = latent.absorb(q, weight, 17), latent.expand(x, weight, 17)
    monkeypatch.setattr(latent.compiled, "supports", lambda *tensors: False)
    tolerance = 32 * torch.finfo(dtype).eps
    for found, wanted in zip(ours, (latent.absorb(q, weight, 17), latent.expand(x, weight, 17)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_gradients_are_those_of_plain_products():
    nope, value, rank = 6, 5, 7
    weight = draw(3, nope + value, rank, dtype=torch.float32).requires_grad_()
    q = draw(4, 3, nope + 2, dtype=torch.float32, seed=1).requires_grad_()
    x = draw(4, 3, rank, dtype=torch.float32, seed=2).requires_grad_()
    plain = torch.cat((torch.einsum("thn,hnr->thr", q[..., :nope], weight[:, :nope]), q[..., nope:]), -1)
    pairs = [
        (latent.absorb(q, weight, nope), plain, (q, weight)),
        (latent.expand(x, weight, nope), torch.einsum("thr,hvr->thv", x, weight[:, nope:]), (x, weight)),
    ]
    for ours, theirs, inputs in pairs:
        grad = draw(*ours.shape, dtype=torch.float32, seed=3)
        found, wanted = torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad)
        for mine, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, right)


def test_an_adapter_changes_the_matrix():
    nope, value, rank, heads = 6, 5, 7, 3
    weight, q = draw(heads, nope + value, rank, dtype=torch.float32), draw(4, heads, nope + 2, dtype=torch.float32)
    x, a = draw(4, heads, rank, dtype=torch.float32, seed=2), draw(2, rank, dtype=torch.float32, seed=3)
    b = draw(heads, nope + value, 2, dtype=torch.float32, seed=4)
    adapter = latent.LatentAdapter(a, b, 0.5)
    changed = weight + 0.5 * b @ a
    absorbed = adapter.absorb(q, latent.absorb(q, weight, nope), nope)
    torch.testing.assert_close(absorbed, latent.absorb(q, changed, nope), rtol=1e-5, atol=1e-5)
    expanded = adapter.expand(x, latent.expand(x, weight, nope), nope)
    torch.testing.assert_close(expanded, latent.expand(x, changed, nope), rtol=1e-5, atol=1e-5)


def through_pool(q, k, dv, *, block_size, size=11, has_latents=True):
    """One sequence of q [T, H, Dk] and k [T, 1, Dk], in chunks of `size`, over shuffled blocks of a pool of NaNs."""
    blocks = list(range(-(-len(q) // block_size)))
    random.Random(0).shuffle(blocks)
    layer = KVLayer(len(blocks), 1, q.shape[-1], dv, block_size=block_size, dtype=q.dtype, has_latents=has_latents)
    for tensor in layer.tensors():
        tensor.fill_(math.nan)
    params, out = AttentionParams(q.shape[-1] ** -0.5, 40), []
    for first in range(0, len(q), size):
        end = min(first + size, len(q))
        plan = AttentionPlan([Chunk(first, end - first, blocks)], block_size=block_size, num_kv_heads=1)
        out.append(layer.attend(plan, q[first:end], k[first:end], k[first:end, :, :dv], params))
    return torch.cat(out), layer


@needs_compiler
@DTYPES
@pytest.mark.parametrize(("heads", "dk", "dv"), [(3, 24, 16), (5, 19, 13), (64, 96, 64)])
def test_a_pool_of_latents_gives_the_bits_of_keys_and_values(dtype, heads, dk, dv):
    q, k = draw(90, heads, dk, dtype=dtype), draw(90, 1, dk, dtype=dtype, seed=1)
    wanted, _ = through_pool(q, k, dv, block_size=64, size=90, has_latents=False)
    assert not wanted.isnan().any()
    for block_size, size in ((1, 90), (4, 7), (16, 11), (64, 90)):
        found, layer = through_pool(q, k, dv, block_size=block_size, size=size)
        assert torch.equal(found, wanted)
        assert [tensor.numel() for tensor in layer.tensors()] == [-(-90 // block_size) * block_size * dk]
    values = k[None].transpose(1, 2)
    out, _ = attend_dense(q[None].transpose(1, 2), values, values[..., :dv], AttentionParams(dk**-0.5, 40))
    assert torch.equal(out[0], wanted)


@needs_compiler
def test_heads_are_cut_into_parts_that_divide_them():
    assert [num_parts(heads) for heads in (1, 16, 20, 32, 48, 64, 128, 37)] == [1, 1, 1, 1, 2, 2, 4, 37]
    assert [num_parts(16, wanted) for wanted in (1, 3, 16, 99)] == [1, 4, 16, 16]


@needs_compiler
def test_gradients_of_latents_are_those_of_one_key_head():
    q, k = draw(2, 64, 70, 24, dtype=torch.float32), draw(2, 1, 70, 24, dtype=torch.float32, seed=1)
    v, params = k[..., :16], AttentionParams(24**-0.5)
    out, lse = attend_dense(q, k, v, params)
    grad = draw(*out.shape, dtype=torch.float32, seed=2)
    found = attention_gradients(q, k, v, out, lse, grad, params)
    wanted = dense_attention._attention_gradients(q, k, v.contiguous(), out, lse, grad, params)
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("heads", "dv"), [(2, 8), (1, 25)])
def test_latents_of_several_heads_or_too_few_channels_are_refused(heads, dv):
    with pytest.raises(ValueError, match="Latents are of one head"):
        KVLayer(1, heads, 24, dv, block_size=16, dtype=torch.float32, has_latents=True)


@needs_compiler
def test_unreadable_tensors_are_refused():
    weight, q = draw(3, 11, 7, dtype=torch.float32), draw(4, 3, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match="weight should be"):
        latent.compiled.absorb(q[:, :2], weight, 6)
    with pytest.raises(ValueError, match="x should be"):
        latent.compiled.expand(q, weight, 6)
    assert attention.are_latents(q[None], q[None]) is False
