"""Attention over latents on a device: products of heads, and a pool whose values are channels of its keys."""

import pytest
import torch

from rollout_engine.kernels import latent as twin
from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.triton import tiling
from rollout_engine.kernels.triton.dense import attend_dense
from rollout_engine.kernels.triton.latent import absorb, expand
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.paged_attention import Batch, Heads, Limits, PagedAttention
from tests.unit.kernels.triton.paged import Contexts, starts_of

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SIZES = pytest.mark.parametrize(
    ("heads", "nope", "rope", "value", "rank"),
    [(3, 16, 8, 12, 16), (2, 5, 3, 7, 19), pytest.param(2, 128, 64, 128, 512, marks=pytest.mark.slow)],
)
ENDS, COUNTS, NUM_DECODES = [40, 17, 33, 21], [1, 1, 9, 21], 2


def draw(*shape, dtype=torch.float32, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.quick(1)
@DTYPES
@SIZES
def test_products_are_right_and_rows_and_heads_do_not_depend_on_one_another(
    device, dtype, heads, nope, rope, value, rank
):
    weight = draw(heads, nope + value, rank, dtype=dtype, device=device) / rank**0.5
    q, x = (draw(70, heads, size, dtype=dtype, device=device, seed=size) for size in (nope + rope, rank))
    absorbed, expanded = absorb(q, weight, nope), expand(x, weight, nope)
    tolerance = 32 * torch.finfo(dtype).eps
    wanted = torch.einsum("thn,hnr->thr", q[..., :nope].double(), weight[:, :nope].double())
    torch.testing.assert_close(absorbed[..., :rank].double(), wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(absorbed[..., rank:], q[..., nope:])
    wanted = torch.einsum("thr,hvr->thv", x.double(), weight[:, nope:].double())
    torch.testing.assert_close(expanded.double(), wanted, rtol=tolerance, atol=tolerance)
    for first, count in ((0, 1), (3, 2), (5, 17), (1, 65)):
        part = slice(first, first + count)
        assert torch.equal(absorb(q[part], weight, nope), absorbed[part])
        assert torch.equal(expand(x[part], weight, nope), expanded[part])
    one = slice(heads - 1, heads)  # as on a rank
    assert torch.equal(absorb(q[:, one], weight[one], nope), absorbed[:, one])
    assert torch.equal(expand(x[:, one], weight[one], nope), expanded[:, one])
    by_head = x.transpose(0, 1).contiguous().transpose(0, 1)  # other strides
    assert torch.equal(expand(by_head, weight, nope), expanded)


def test_gradients_are_those_of_the_twin(device):
    weight, q = draw(3, 11, 7, device=device).requires_grad_(), draw(4, 3, 8, device=device, seed=1).requires_grad_()
    x = draw(4, 3, 7, device=device, seed=2).requires_grad_()
    for function, given, kernel in ((twin.absorb, q, absorb), (twin.expand, x, expand)):
        ours, theirs = function(given, weight, 6, kernel), function(given, weight, 6)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        grad = draw(*ours.shape, device=device, seed=3)
        for mine, right in zip(
            torch.autograd.grad(ours, (given, weight), grad),
            torch.autograd.grad(theirs, (given, weight), grad),
            strict=True,
        ):
            torch.testing.assert_close(mine, right)


def test_no_tokens_are_no_work_and_what_does_not_fit_is_refused(device):
    weight, q = draw(3, 11, 7, device=device), draw(4, 3, 8, device=device)
    assert absorb(q[:0], weight, 6).shape == (0, 3, 9) and expand(q[:0, :, :7], weight, 6).shape == (0, 3, 5)
    with pytest.raises(ValueError, match="weights of their heads"):
        absorb(q[:, :2], weight, 6)
    with pytest.raises(ValueError, match="weights of their heads"):
        expand(q[..., :7].bfloat16(), weight, 6)


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Several units of attention in a short context."""
    monkeypatch.setattr(tiling, "_DETERMINISTIC_UNIT", 16)
    monkeypatch.setattr(tiling, "_tile", lambda *_: 16)


def contexts_of(heads, dims, device, *, block_size=16, dtype=torch.float32):
    torch.manual_seed(0)
    return Contexts(ENDS, (heads, 1), dims, block_size=block_size, dtype=dtype, device=device, has_latents=True)


def run(contexts, params, *, deterministic):
    """[T, H, Dv] of all sequences' last tokens, in one batch."""
    heads = Heads.of(
        *(contexts.num_heads, 1, contexts.dim_k, contexts.dim_v, contexts.dtype), has_latents=contexts.has_latents
    )
    how = {"deterministic": deterministic, "num_processors": 2}
    attention = PagedAttention(heads, Limits(64, 4, 64), contexts.device, **how)
    lens = torch.tensor(ENDS, dtype=torch.int32, device=contexts.device)
    attention.plan(
        Batch(starts_of(COUNTS, contexts.device), lens, contexts.tables, NUM_DECODES), {params.sliding_window}
    )
    q = contexts.flat_queries(ENDS, COUNTS)
    out = q.new_full((*q.shape[:2], contexts.dim_v), torch.nan)
    attention.attend(q, contexts.layer, params, out)
    return out


SHAPES = pytest.mark.parametrize(
    ("heads", "dims"),
    [
        (3, (24, 16)),
        (5, (19, 13)),
        pytest.param(128, (24, 16), id="two parts of heads", marks=pytest.mark.slow),
        pytest.param(16, (576, 512), id="DeepSeek's", marks=pytest.mark.slow),
    ],
)


@pytest.mark.quick(1)
@SHAPES
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("window", [0, 11])
def test_attention_over_latents_is_attention(device, heads, dims, deterministic, window):
    contexts = contexts_of(heads, dims, device)
    params = AttentionParams(dims[0] ** -0.5, window)
    expected, _ = contexts.expected(ENDS, COUNTS, params)
    out = run(contexts, params, deterministic=deterministic)
    torch.testing.assert_close(out.double(), expected, atol=5e-6, rtol=1e-5)


@pytest.mark.quick(1)
@DTYPES
@SHAPES
def test_a_trainers_whole_sequences_have_the_bits_of_chunks_over_any_blocks(device, dtype, heads, dims):
    params, served = AttentionParams(dims[0] ** -0.5), []
    for block_size in (4, 16, 64):
        contexts = contexts_of(heads, dims, device, block_size=block_size, dtype=dtype)
        served.append(run(contexts, params, deterministic=True))
    assert all(torch.equal(each, served[0]) for each in served)
    for sequence, (end, count) in enumerate(zip(ENDS, COUNTS, strict=True)):
        q, k = (x[sequence][:end][None].transpose(1, 2).to(device) for x in (contexts.queries, contexts.keys))
        out, _ = attend_dense(q, k, k[..., : dims[1]], params)
        assert torch.equal(out[0, end - count :], served[0][sum(COUNTS[:sequence]) :][:count])


@pytest.mark.quick(1)
@DTYPES
def test_a_pool_of_latents_gives_what_keys_and_values_give(device, dtype):
    contexts, params = contexts_of(3, (24, 16), device, dtype=dtype), AttentionParams(0.2)
    wanted = run(contexts, params, deterministic=True)
    assert contexts.layer.has_latents and contexts.layer.own_tensors == (contexts.layer.keys,)
    contexts.layer = KVLayer(contexts.layer.keys, contexts.layer.values.clone())
    contexts.has_latents = False
    assert not contexts.layer.has_latents and len(contexts.layer.own_tensors) == 2
    tolerance = 4 * torch.finfo(dtype).eps
    out = run(contexts, params, deterministic=True)
    torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)


def test_heads_that_read_latents_are_cut_into_equal_parts_of_few_rows():
    for num_heads, parts in ((1, 1), (16, 1), (20, 2), (32, 2), (40, 4), (128, 8), (37, 37)):
        for dtype in (torch.bfloat16, torch.float32):
            heads = Heads.of(num_heads, 1, 576, 512, dtype, has_latents=True)
            assert (heads.num_kv_heads, heads.group) == (parts, num_heads // parts)
            for kind, most in (("decode", 16), ("shared_prefix", 32), ("prefill", 64), ("deterministic", 16)):
                made = heads.tiling(kind)
                assert max(16, heads.group) <= made.block_m <= most
    with pytest.raises(ValueError, match="Latents are of one head"):
        Heads.of(4, 2, 24, 16, torch.float32, has_latents=True)
