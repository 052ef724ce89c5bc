"""Draws: the kernel against its twin, and independence of rows. Distributions: model/test_sampler.py."""

import numpy as np
import pytest
import torch

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.draw import Truncation, draw, redraw
from rollout_engine.kernels.row_stats import TokenMasks
from rollout_engine.kernels.token_logprobs import token_logprobs

needs_kernel = pytest.mark.skipif(build.load_kernels() is None, reason="no compiler")


@pytest.fixture(params=[pytest.param("C++", marks=needs_kernel), "twin"])
def kernel(request, monkeypatch):
    if request.param == "twin":
        monkeypatch.setattr(build, "load_kernels", lambda: None)


def _case(n, vocab_size, dtype, *, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, vocab_size, generator=g) * 4).to(dtype)
    rules = Truncation(
        torch.rand(n, generator=g, dtype=torch.float64) + 0.5,
        torch.randint(0, 40, (n,), generator=g) * (torch.rand(n, generator=g) < 0.4),
        (torch.rand(n, generator=g, dtype=torch.float64) * 1.5).clamp(0.01, 1.0),
        torch.rand(n, generator=g, dtype=torch.float64) * 0.1 * (torch.rand(n, generator=g) < 0.4),
    )
    greedy = torch.rand(n, generator=g) < 0.2
    idle = Truncation(*(torch.tensor(x, dtype=c.dtype) for x, c in zip((1.0, 0, 1.0, 0.0), rules, strict=True)))
    rules = Truncation(*(torch.where(greedy, i, c) for i, c in zip(idle, rules, strict=True)))
    return logits, rules.temperature.float(), torch.rand(n, generator=g, dtype=torch.float64), greedy, rules


@pytest.mark.quick(17)
@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 16, 127, 128, 129, 1000, 6001])
def test_the_kernel_does_what_its_twin_does(monkeypatch, vocab_size, dtype):
    case = _case(200, vocab_size, dtype)
    stats, kept = draw(*case)
    monkeypatch.setattr(build, "load_kernels", lambda: None)
    twin, twin_kept = draw(*case)
    assert torch.equal(stats.maximum, twin.maximum)
    torch.testing.assert_close(stats.log_total, twin.log_total, rtol=1e-6, atol=1e-6)
    assert (stats.tokens == twin.tokens).float().mean() > 0.995  # a uniform may fall between two roundings of a sum
    same = stats.tokens == twin.tokens
    torch.testing.assert_close(stats.logprobs[same], twin.logprobs[same], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(kept.log_total, twin_kept.log_total, rtol=1e-6, atol=1e-6)


@needs_kernel
def test_the_kernel_keeps_all_tokens_where_top_k_is_0_or_less():
    logits, temperatures, u, greedy, rules = _case(40, 300, torch.float32)
    expected, found = (
        draw(logits, temperatures, u, greedy, rules._replace(top_k=torch.full((40,), top_k))) for top_k in (0, -(2**63))
    )
    for column, other in zip((*expected[0], *expected[1]), (*found[0], *found[1]), strict=True):
        assert torch.equal(column, other)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_drawn_alike_alone_in_company_and_by_any_threads(thread_count, dtype):
    logits, temperatures, u, greedy, rules = _case(90, 3001, dtype)
    stats, kept = draw(logits, temperatures, u, greedy, rules)
    thread_count(2)
    for rows in (slice(0, 1), slice(89, 90), slice(10, 60)):
        again, again_kept = draw(logits[rows], temperatures[rows], u[rows], greedy[rows], rules.rows(rows))
        assert all(torch.equal(x, y[rows]) for x, y in zip((*again, *again_kept), (*stats, *kept), strict=True))


@needs_kernel
def test_the_log_prob_has_the_bits_of_token_logprobs():
    logits, temperatures, u, greedy, rules = _case(90, 3001, torch.bfloat16)
    stats, _ = draw(logits, temperatures, u, greedy, rules)
    assert torch.equal(stats.logprobs, token_logprobs(logits, stats.tokens, temperatures))


@needs_kernel
def test_an_idle_rule_changes_no_bit():
    logits, temperatures, u, greedy, rules = _case(60, 700, torch.float32)
    plain, nothing = draw(logits, temperatures, u, greedy)
    idle = Truncation(*(torch.full_like(c, x) for x, c in zip((1.0, 0, 1.0, 0.0), rules, strict=True)))
    stats, kept = draw(logits, temperatures, u, greedy, idle)
    assert nothing is None
    assert all(torch.equal(x, y) for x, y in zip(stats, plain, strict=True))
    assert torch.equal(kept.log_total, plain.log_total)


def test_rows_may_be_strided_or_repeated():
    logits, temperatures, u, greedy, rules = _case(50, 300, torch.float32)
    wide = torch.zeros(50, 640)
    wide[:, ::2][:, 7:307] = logits
    expected, _ = draw(logits, temperatures, u, greedy, rules)
    got, _ = draw(wide[:, ::2][:, 7:307], temperatures, u, greedy, rules)
    assert torch.equal(got.tokens, expected.tokens)
    one, _ = draw(logits[:1].expand(50, -1), temperatures, u, greedy, rules)
    copies, _ = draw(logits[:1].repeat(50, 1), temperatures, u, greedy, rules)
    assert torch.equal(one.tokens, copies.tokens)


def _masks(n, vocab_size, *, seed=0):
    """Masks of all shares of allowed tokens, for two rows of three."""
    g = torch.Generator().manual_seed(seed)
    num_masks = n - n // 3
    share = torch.rand(num_masks, 1, generator=g) ** 3
    allowed = torch.rand(num_masks, vocab_size, generator=g) < share
    allowed[torch.arange(num_masks), torch.randint(0, vocab_size, (num_masks,), generator=g)] = True
    bits = np.zeros((num_masks, -(-vocab_size // 32) + 1), np.uint32)
    packed = np.packbits(allowed.numpy(), axis=1, bitorder="little")
    bits.view(np.uint8)[:, : packed.shape[1]] = packed
    bits[:, -1] |= 1 << 31  # past the vocabulary: never looked at
    places = torch.full((n,), -1)
    places[torch.randperm(n, generator=g)[:num_masks]] = torch.arange(num_masks)
    return allowed, TokenMasks(torch.from_numpy(bits.view(np.int32)), places)


@pytest.mark.quick(12)
@pytest.mark.parametrize("with_rules", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 31, 259, 4096])
def test_a_masked_row_is_drawn_again_as_one_with_minus_infinity_there(kernel, vocab_size, dtype, with_rules):
    logits, temperatures, u, greedy, rules = _case(90, vocab_size, dtype)
    rules = rules if with_rules else None
    allowed, masks = _masks(90, vocab_size)
    plain, plain_kept = draw(logits, temperatures, u, greedy, rules)
    stats, kept = draw(logits, temperatures, u, greedy, rules)
    redraw(logits, temperatures, u, greedy, rules, masks, stats, kept)
    rows = (masks.places >= 0).nonzero()[:, 0]
    changed = logits.float().clone()
    changed[rows] = changed[rows].masked_fill(~allowed[masks.places[rows]], -torch.inf)
    expected, left = draw(changed, temperatures, u, greedy, rules)
    assert torch.equal(stats.tokens, expected.tokens)
    assert torch.equal(stats.maximum, plain.maximum) and torch.equal(stats.log_total, plain.log_total)
    assert torch.equal(stats.logprobs, token_logprobs(logits, stats.tokens, temperatures))
    if with_rules:
        shift = (expected.maximum.double() - plain.maximum) / temperatures
        torch.testing.assert_close(kept.log_total, left.log_total + shift, rtol=1e-12, atol=1e-12)
        assert torch.equal(kept.floor, left.floor) and torch.equal(kept.last_tie, left.last_tie)
        others = masks.places < 0
        assert all(torch.equal(ours[others], theirs[others]) for ours, theirs in zip(kept, plain_kept, strict=True))


def test_a_mask_that_leaves_nothing_leaves_no_token(kernel):
    logits, temperatures, u, greedy, rules = _case(5, 70, torch.float32)
    logits[2, 7], logits[4, 1] = -torch.inf, torch.nan
    bits = torch.zeros(2, 3, dtype=torch.int32)
    bits[1, 0] = 1 << 7  # which has no weight in row 2
    stats, kept = draw(logits, temperatures, u, greedy, rules)
    tokens = stats.tokens.tolist()
    redraw(logits, temperatures, u, greedy, rules, TokenMasks(bits, torch.tensor([-1, 0, 1, 1, 1])), stats, kept)
    assert stats.tokens.tolist() == [tokens[0], -1, -1, 7, tokens[4]]  # no token of a broken row counts
    assert kept.log_total.isfinite().tolist() == [True, False, False, True, False]
    assert stats.maximum.isfinite().tolist() == [True] * 4 + [False]
