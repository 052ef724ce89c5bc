"""The kernels beside attention at real sizes on a CUDA device: values, bits, captured graphs."""

import pytest
import torch
import torch.nn.functional as F

from rollout_engine.kernels.cpu.adapters import AdapterRows
from rollout_engine.kernels.rng import uniforms
from rollout_engine.kernels.row_stats import KeptTokens, RowStats, Truncation
from rollout_engine.kernels.triton.activation import gated
from rollout_engine.kernels.triton.adapters import BLOCK_ROWS, AdapterBatch, AdapterPair, AdapterTable
from rollout_engine.kernels.triton.copies import FusedCopy
from rollout_engine.kernels.triton.matmul import matmul
from rollout_engine.kernels.triton.norm import add_rms_norm, rms_norm
from rollout_engine.kernels.triton.sampling import Choice, SamplingRows, SamplingWorkspace, sample
from rollout_engine.kernels.triton.top_tokens import top_tokens
from rollout_engine.kernels.triton.truncation import truncate
from sync.digests import tensor_digest
from sync.tensor_check import TensorCheck

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE, DTYPE = "cuda", torch.bfloat16
VOCAB_SIZE = 151_936


def _random(*shape, dtype=DTYPE):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def _rows(n, temperature=1.0):
    seeds = torch.arange(n, device=DEVICE) * 7919
    temperatures = torch.full((n,), temperature, device=DEVICE)
    return SamplingRows(temperatures, seeds, seeds % 1000, torch.zeros(n, dtype=torch.int32, device=DEVICE))


def _sampled(logits, rows, **limits):
    n, vocab_size = logits.shape
    workspace, stats = SamplingWorkspace.empty(n, vocab_size, DEVICE), RowStats.empty(n, DEVICE)
    sample(logits, rows, workspace, stats)
    kept = KeptTokens(stats.log_total.clone(), stats.maximum.clone(), stats.tokens.clone())
    idle = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | limits
    dtypes = torch.int64, torch.float64, torch.float64
    columns = [torch.full((n,), x, dtype=dtype, device=DEVICE) for x, dtype in zip(idle.values(), dtypes, strict=True)]
    truncate(logits, rows, Truncation(rows.temperatures.double(), *columns), workspace, stats, kept)
    return stats, kept, workspace


@pytest.mark.parametrize("size", [1024, 4096, 5120, 8192])
@pytest.mark.parametrize("tokens", [1, 3, 257])
def test_a_norm_after_a_sum_is_exact_to_a_rounding_and_alike_in_any_batch(size, tokens):
    residual, delta, weight = _random(300, size), _random(300, size), _random(size)
    exact = (residual + delta).double()
    exact = weight.double() * exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    part, out = residual[:tokens].clone(), torch.empty(tokens, size, dtype=DTYPE, device=DEVICE)
    add_rms_norm(part, delta[:tokens], weight, 1e-6, out)
    torch.testing.assert_close(out.double(), exact[:tokens], rtol=2**-6, atol=1e-5)
    together = add_rms_norm(residual, delta, weight, 1e-6, torch.empty_like(residual))
    assert torch.equal(part, residual[:tokens]) and torch.equal(out, together[:tokens])
    assert torch.equal(out, rms_norm(part, weight, 1e-6, torch.empty_like(part)))


def test_a_gated_activation_is_exact_to_two_roundings():
    gate, up = _random(257, 2 * 12288).chunk(2, dim=1)
    out = gated(gate, up, torch.empty(257, 12288, dtype=DTYPE, device=DEVICE))
    torch.testing.assert_close(out.double(), F.silu(gate.double()) * up.double(), rtol=2**-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(6144, 1024), (1024, 3072), (24576, 4096), (1000, 1001)], ids=str)
def test_a_product_is_right_and_its_rows_alike_in_any_batch(shape, dtype):
    out_features, in_features = shape
    x, weight = _random(1025, in_features, dtype=dtype), _random(*shape, dtype=dtype)
    together = matmul(x, weight, None, torch.empty(1025, out_features, dtype=dtype, device=DEVICE))
    exact = x[:64].double() @ weight.double().T
    torch.testing.assert_close(together[:64].double(), exact, rtol=2**-7, atol=1e-2)
    for start, count in ((0, 1), (5, 1), (7, 2), (100, 16), (3, 63), (900, 64), (1, 65), (11, 200), (500, 512)):
        part = x[start : start + count]
        alone = matmul(part, weight, None, torch.empty(count, out_features, dtype=dtype, device=DEVICE))
        assert torch.equal(alone, together[start : start + count]), (start, count)


def _bound(logits, temperature):
    """The bound of masses that `kernels.triton.sampling` states, [N]."""
    exact = logits.double() / temperature
    depths = exact.amax(-1, keepdim=True) - exact
    return 2**-19 + (exact.softmax(-1) * depths).sum(-1) * 2**-21


@pytest.mark.parametrize("scale", [0.1, 3.0])
@pytest.mark.parametrize("limits", [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 100, "top_p": 0.8, "min_p": 0.01}])
def test_draws_are_where_their_uniforms_fall(limits, scale):
    n = 64
    logits, rows = _random(n, VOCAB_SIZE) * scale, _rows(n, 0.8)
    bound = _bound(logits, 0.8)
    stats, kept, _ = _sampled(logits, rows, **limits)
    stays = (logits.float() > kept.floor[:, None]) | (
        (logits.float() == kept.floor[:, None]) & (torch.arange(VOCAB_SIZE, device=DEVICE) <= kept.last_tie[:, None])
    )
    if "top_k" in limits and "top_p" not in limits:
        assert (stays.sum(-1) == limits["top_k"]).all()
    weights = (logits.double() / 0.8).softmax(-1).where(stays, 0.0)
    if "top_p" in limits and "top_k" not in limits:
        assert ((weights.sum(-1) >= 0.9 - bound) & (weights.sum(-1) < 0.9 + weights.amax(-1) + bound)).all()
    ends = (weights / weights.sum(-1, keepdim=True)).cumsum(-1)
    u = uniforms(rows.seeds.cpu(), rows.positions.cpu()).to(DEVICE)
    row = torch.arange(n, device=DEVICE)
    end, weight = ends[row, stats.tokens], weights[row, stats.tokens] / weights.sum(-1)
    assert ((weight > 0) & (u <= end + bound) & (u >= end - weight - bound)).all()
    exact = (logits.double() / 0.8).log_softmax(-1)[row, stats.tokens]
    assert ((stats.logprobs.double() - exact).abs() <= bound * exact.abs().clamp(min=1.0)).all()


def test_draws_and_scores_are_the_same_bits_alone_and_in_company():
    logits, rows = _random(300, VOCAB_SIZE) * 3, _rows(300)
    together, kept, workspace = _sampled(logits, rows, top_p=0.9)
    for part in (slice(0, 1), slice(17, 18), slice(100, 228)):
        alone, alone_kept, _ = _sampled(logits[part], SamplingRows(*(x[part] for x in rows)), top_p=0.9)
        assert all(torch.equal(x, y[part]) for x, y in zip((*alone, *alone_kept), (*together, *kept), strict=True))
    rows.choices.fill_(Choice.GIVEN)
    given = RowStats.empty(300, DEVICE)
    given.tokens.copy_(together.tokens)
    sample(logits, rows, workspace, given)
    assert all(torch.equal(x, y) for x, y in zip(given, together, strict=True))


def test_the_most_likely_tokens_come_sorted():
    logits, rows = _random(32, VOCAB_SIZE, dtype=torch.float32), _rows(32)
    stats, _, workspace = _sampled(logits, rows)
    ids, logprobs = torch.empty(32, 20, dtype=torch.int32, device=DEVICE), torch.empty(32, 20, device=DEVICE)
    top_tokens(logits, rows.temperatures, workspace, stats, ids, logprobs)
    values, expected = logits.double().log_softmax(-1).topk(20)
    assert torch.equal(ids.long(), expected)
    bound = _bound(logits, 1.0)[:, None]
    assert ((logprobs.double() - values).abs() <= bound * values.abs().clamp(min=1.0)).all()


def test_a_captured_draw_follows_its_inputs():
    logits, rows = _random(16, VOCAB_SIZE), _rows(16)
    workspace, stats = SamplingWorkspace.empty(16, VOCAB_SIZE, DEVICE), RowStats.empty(16, DEVICE)
    sample(logits, rows, workspace, stats)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, rows, workspace, stats)
    logits.copy_(_random(16, VOCAB_SIZE))
    rows.positions.add_(1)
    graph.replay()
    expected, _, _ = _sampled(logits, rows)
    assert all(torch.equal(x, y) for x, y in zip(stats, expected, strict=True))


def test_a_model_is_copied_in_one_launch():
    shapes = [(VOCAB_SIZE, 1024), *[(6144, 1024), (1024,), (128,), (1024, 3072)] * 28]
    sources = [_random(*shape) for shape in shapes]
    targets = [torch.empty_like(source) for source in sources]
    copy = FusedCopy(list(zip(sources, targets, strict=True)))
    copy.run()
    assert all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True))


def test_what_is_copied_and_looked_at_in_one_pass_is_what_the_host_finds():
    sizes = [(4096, 4096), (151_936, 64), (1024,), (3,), (500, 41), (0, 7)]
    sources, outs = [_random(*size) for size in sizes], [_random(*size) for size in sizes]
    sources[1][77_777, 7] = float("inf")
    check = TensorCheck(check_finite=True)
    for source, out in zip(sources, outs, strict=True):
        check.add(source, out)
    check.add(sources[0].t())
    assert check.results() == [(tensor_digest(x), x is not sources[1]) for x in sources] + [
        (tensor_digest(sources[0].t()), True)
    ]
    assert all(torch.equal(*pair) for pair in zip(sources, outs, strict=True))


@pytest.mark.parametrize("rank", [8, 64])
def test_adapters_are_their_formula_and_alike_in_any_batch(rank):
    table = AdapterTable(4, 1024, [2048, 1024, 1024], DTYPE, torch.device(DEVICE))
    for slot in range(4):
        matrices = [(_random(rank, 1024), _random(size, rank)) for size in table.sizes]
        table.set(slot, [AdapterPair.packed(a, b, 0.25, DTYPE) for a, b in matrices])
    x, out = _random(300, 1024), _random(300, 4096)
    slots = [row % 5 - 1 for row in range(300)]
    mixed = out.clone()
    table.add(x, mixed, AdapterBatch.of(AdapterRows.of(slots, [1] * 300, BLOCK_ROWS), torch.device(DEVICE)))
    for slot in range(4):
        rows = torch.tensor([row for row in range(300) if slots[row] == slot], device=DEVICE)
        alone = out[rows]
        table.add(
            x[rows], alone, AdapterBatch.of(AdapterRows.of([slot], [len(rows)], BLOCK_ROWS), torch.device(DEVICE))
        )
        assert torch.equal(mixed[rows], alone)
        deltas = [x[rows].double() @ pair.a.double().T @ pair.b.double().T * 0.25 for pair in table.pairs[slot]]
        torch.testing.assert_close(alone.double(), out[rows].double() + torch.cat(deltas, 1), rtol=2**-7, atol=0.5)
    assert torch.equal(mixed[::5], out[::5])
