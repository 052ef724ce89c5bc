"""Log-probs over some tokens: those of a softmax of these alone, with the bits of a draw from them."""

import pytest
import torch

from rollout_engine.kernels.draw import draw
from rollout_engine.kernels.row_stats import TokenSets, Truncation
from rollout_engine.kernels.support_logprobs import support_logprobs
from rollout_engine.kernels.token_logprobs import logprobs_at, row_temperatures, token_logprobs
from rollout_engine.kernels.truncation import kept_ids


def case(n, vocab_size, dtype, seed=0):
    """Logits with ties, sets of all sizes, every third empty, and a token of each set."""
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, vocab_size, generator=g) * 4).mul(4).round().div(4).to(dtype)
    tokens = torch.randint(0, vocab_size, (n,), generator=g)
    is_in = torch.rand(n, vocab_size, generator=g) < torch.rand(n, 1, generator=g) ** 2
    is_in[torch.arange(n), tokens] = True
    is_in[::3] = False
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), is_in.sum(1).cumsum(0)])
    is_in[::3] = True
    ids = is_in.nonzero()
    return logits, tokens, is_in, TokenSets(starts, ids[ids[:, 0] % 3 > 0][:, 1].int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 31, 128, 259, 3001])
def test_equals_a_softmax_of_the_sets_tokens_with_its_gradient(side, vocab_size, dtype):
    logits, tokens, is_in, sets = case(30, vocab_size, dtype)
    wide = logits.double().requires_grad_()
    expected = (wide.masked_fill(~is_in, -torch.inf) / 0.7).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    narrow = logits.clone().requires_grad_()
    found = support_logprobs(narrow, tokens, 0.7, sets)
    torch.testing.assert_close(found.double(), expected, rtol=3e-7, atol=3e-6)
    weights = torch.linspace(-1, 1, 30)
    found.backward(weights)
    expected.backward(weights.double())
    assert narrow.grad.dtype == dtype and (narrow.grad[~is_in] == 0).all()
    bounds = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(narrow.grad.double(), wide.grad, **bounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_set_has_the_bits_of_the_whole_row(side, dtype):
    logits, tokens, _, _ = case(20, 700, dtype)
    sets = TokenSets(torch.zeros(21, dtype=torch.int64), torch.empty(0, dtype=torch.int32))
    assert torch.equal(support_logprobs(logits, tokens, 0.7, sets), token_logprobs(logits, tokens, 0.7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [7, 259, 4096])
def test_has_the_bits_of_a_truncated_draw(side, vocab_size, dtype):
    logits, *_ = case(120, vocab_size, dtype, seed=1)
    temperatures = row_temperatures(0.7, logits)
    g = torch.Generator().manual_seed(2)
    rules = Truncation(
        temperatures.double(),
        torch.tensor([0, 20, 3]).repeat(40),
        torch.tensor([0.9, 1.0, 0.5, 1.0]).double().repeat(30),
        torch.tensor([0.0, 0.05]).double().repeat_interleave(60),
    )
    u = torch.rand(120, generator=g, dtype=torch.float64)
    stats, kept = draw(logits, temperatures, u, torch.zeros(120, dtype=torch.bool), rules)
    chosen = logits.gather(1, stats.tokens[:, None])[:, 0]
    expected = logprobs_at(chosen, stats.maximum, temperatures, kept.log_total)
    sets = kept_ids(logits, torch.arange(120), kept.floor, kept.last_tie)
    assert torch.equal(support_logprobs(logits, stats.tokens, 0.7, sets), expected)


def test_kept_ids_are_those_inside_the_edges(side):
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, -torch.inf]]).repeat(2, 12)[:, :70].contiguous()
    floor, last_tie = torch.tensor([2.0, -torch.inf, 3.0]), torch.tensor([16, 69, -1])
    sets = kept_ids(logits, torch.tensor([1, 0, 1]), floor, last_tie)
    rows = logits[0]
    expected = [
        [t for t in range(70) if rows[t] > 2 or (rows[t] == 2 and t <= 16)],
        [t for t in range(70) if rows[t] > -torch.inf],
        [],
    ]
    assert [_row(sets, row).tolist() for row in range(3)] == expected
    assert sets.ids.dtype == torch.int32


def test_a_row_has_the_same_bits_in_any_batch_and_by_any_threads(thread_count):
    logits, tokens, _, sets = case(90, 4096, torch.bfloat16)
    expected = support_logprobs(logits, tokens, 0.7, sets)
    thread_count(2)
    assert torch.equal(support_logprobs(logits, tokens, 0.7, sets), expected)
    for row in range(0, 90, 7):
        ids = _row(sets, row)
        one = TokenSets(torch.tensor([0, len(ids)]), ids)
        assert torch.equal(support_logprobs(logits[[row]], tokens[[row]], 0.7, one), expected[[row]])


def test_sets_of_another_number_of_rows_are_refused():
    logits, tokens, _, sets = case(4, 9, torch.float32)
    with pytest.raises(ValueError, match="support.starts should be of 4 places for 3 rows"):
        support_logprobs(logits[:3], tokens[:3], 1.0, sets)


def _row(sets, row):
    return sets.ids[int(sets.starts[row]) : int(sets.starts[row + 1])]
