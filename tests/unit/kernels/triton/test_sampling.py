"""Draws, log-probs, truncation and most likely tokens in Triton against their eager twins and exact sums."""

from typing import NamedTuple

import pytest
import torch

from rollout_engine.kernels.draw import draw
from rollout_engine.kernels.rng import uniforms
from rollout_engine.kernels.row_stats import KeptTokens, RowStats, Truncation
from rollout_engine.kernels.token_logprobs import row_stats
from rollout_engine.kernels.triton.sampling import (
    Choice,
    SamplingRows,
    SamplingWorkspace,
    sample,
)
from rollout_engine.kernels.triton.top_tokens import top_tokens
from rollout_engine.kernels.triton.truncation import truncate
from rollout_engine.kernels.truncation import is_kept, most_likely

DTYPES = [torch.float32, torch.bfloat16]
SLACK = 2.0**-20
"""Tolerance of the contract for float32 weights."""
# Of the interpreter: arithmetic on NaN and infinities, which the kernels mean.
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:divide by zero encountered in log:RuntimeWarning",
    "ignore:All-NaN:RuntimeWarning",
)


class _Case(NamedTuple):
    logits: torch.Tensor
    rows: SamplingRows
    rules: Truncation

    @classmethod
    def random(cls, n, vocab_size, dtype, device, *, seed=0, scale=3.0):
        g = torch.Generator().manual_seed(seed)
        logits = (torch.randn(n, vocab_size, generator=g) * scale).to(dtype)
        temperatures = torch.rand(n, generator=g) + 0.5
        seeds, positions = torch.randint(-(2**63), 2**63 - 1, (n,), generator=g), torch.arange(n) * 1_000_000_007
        rows = SamplingRows(temperatures, seeds, positions, torch.zeros(n, dtype=torch.int32))
        rules = Truncation(
            temperatures.double(),
            torch.zeros(n, dtype=torch.int64),
            torch.ones(n, dtype=torch.float64),
            torch.zeros(n, dtype=torch.float64),
        )
        return cls(
            logits.to(device),
            SamplingRows(*(x.to(device) for x in rows)),
            Truncation(*(x.to(device) for x in rules)),
        )

    def run(self, truncated=False):
        """(stats, kept, workspace)."""
        n, vocab_size = self.logits.shape
        device = self.logits.device
        workspace, stats = SamplingWorkspace.empty(n, vocab_size, device), RowStats.empty(n, device)
        stats.tokens.zero_()
        sample(self.logits, self.rows, workspace, stats)
        if not truncated:
            return stats, None, workspace
        kept = KeptTokens(stats.log_total.clone(), stats.maximum.clone(), stats.tokens.clone())
        truncate(self.logits, self.rows, self.rules, workspace, stats, kept)
        return stats, kept, workspace

    def twin(self, truncated=False):
        """(stats, kept) on the CPU."""
        rows = SamplingRows(*(x.cpu() for x in self.rows))
        rules = Truncation(*(x.cpu() for x in self.rules)) if truncated else None
        u = uniforms(rows.seeds, rows.positions)
        return draw(self.logits.cpu(), rows.temperatures, u, rows.choices == Choice.GREEDY, rules)


def _assert_figures_close(ours, twin):
    ours = RowStats(*(x.cpu() for x in ours))
    assert torch.equal(ours.maximum, twin.maximum)
    torch.testing.assert_close(ours.log_total, twin.log_total, rtol=SLACK, atol=SLACK)
    torch.testing.assert_close(ours.logprobs, twin.logprobs, rtol=SLACK, atol=SLACK)


def _assert_drawn_by_inverse_cdf(case, tokens, stays=None):
    """Each token is where its uniform falls in the exact cumulative distribution, within the contract's tolerance."""
    weights = (case.logits.cpu().double() / case.rows.temperatures.cpu().double()[:, None]).softmax(-1)
    if stays is not None:
        weights = weights.where(stays, 0.0)
        weights /= weights.sum(-1, keepdim=True)
    ends = weights.cumsum(-1)
    u = uniforms(case.rows.seeds.cpu(), case.rows.positions.cpu())
    row, tokens = torch.arange(len(u)), tokens.cpu()
    assert (weights[row, tokens] > 0).all()
    assert (u <= ends[row, tokens] + SLACK).all()
    assert (u >= ends[row, tokens] - weights[row, tokens] - SLACK).all()


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 127, 129, 4200])
def test_a_draw_is_its_twin(device, vocab_size, dtype):
    case = _Case.random(6, vocab_size, dtype, device)
    stats, _, _ = case.run()
    _assert_drawn_by_inverse_cdf(case, stats.tokens)
    twin, _ = case.twin()
    same = stats.tokens.cpu() == twin.tokens
    assert same.float().mean() > 0.8
    twin.logprobs[~same] = stats.logprobs.cpu()[~same]
    _assert_figures_close(stats, twin)


def test_greedy_rows_take_the_first_of_the_most_likely(device):
    case = _Case.random(5, 700, torch.bfloat16, device)
    case.logits[2, [13, 200, 699]] = 50.0
    case.logits[3, [699]] = 50.0
    case.rows.choices[:] = Choice.GREEDY
    stats, _, _ = case.run()
    twin, _ = case.twin()
    assert stats.tokens.tolist() == twin.tokens.tolist()
    _assert_figures_close(stats, twin)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_given_token_has_the_bits_of_the_drawn_one(device, dtype):
    case = _Case.random(5, 1500, dtype, device)
    drawn, _, workspace = case.run()
    case.rows.choices[:] = Choice.GIVEN
    given = RowStats.empty(5, device)
    given.tokens.copy_(drawn.tokens)
    sample(case.logits, case.rows, workspace, given)
    assert all(torch.equal(x, y) for x, y in zip(given, drawn, strict=True))
    twin = row_stats(case.logits.cpu(), case.rows.temperatures.cpu(), drawn.tokens.cpu())
    _assert_figures_close(given, twin)


def test_a_row_is_the_same_bits_in_any_batch(device):
    case = _Case.random(6, 2000, torch.bfloat16, device)
    case.rules.top_p[:] = 0.8
    stats, kept, _ = case.run(truncated=True)
    part = _Case(case.logits[2:4], SamplingRows(*(x[2:4] for x in case.rows)), case.rules.rows(slice(2, 4)))
    alone, alone_kept, _ = part.run(truncated=True)
    assert all(torch.equal(x, y[2:4]) for x, y in zip((*alone, *alone_kept), (*stats, *kept), strict=True))


def test_rows_that_cannot_be_sampled_say_so_and_harm_no_other(device):
    case = _Case.random(5, 300, torch.float32, device)
    case.rules.top_k[:] = 7
    expected, _, _ = case.run(truncated=True)
    case.logits[0, 150] = torch.nan
    case.logits[1, 299] = torch.inf
    case.logits[2] = -torch.inf
    case.logits[3, 5] = -torch.inf  # one that is cut, no harm
    stats, kept, workspace = case.run(truncated=True)
    for column in (stats.maximum, stats.log_total, stats.logprobs, kept.log_total):
        assert column.isnan().tolist() == [True, True, True, False, False]
    assert ((stats.tokens >= 0) & (stats.tokens < 300)).all()
    assert torch.equal(stats.tokens[4:], expected.tokens[4:])
    ids, logprobs = torch.empty(5, 3, dtype=torch.int32, device=device), torch.empty(5, 3, device=device)
    top_tokens(case.logits, case.rows.temperatures, workspace, stats, ids, logprobs)
    assert (ids[:3] == -1).all() and logprobs[:3].isnan().all() and (ids[3:] >= 0).all()


_RULES = {
    "top_k": {"top_k": 20},
    "top_k of one": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 10_000},
    "top_p": {"top_p": 0.9},
    "top_p of nearly nothing": {"top_p": 1e-9},
    "min_p": {"min_p": 0.05},
    "all": {"top_k": 50, "top_p": 0.7, "min_p": 0.01},
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name",
    [name if name in ("top_k", "min_p", "all") else pytest.param(name, marks=pytest.mark.slow) for name in _RULES],
)
def test_truncation_leaves_what_its_twin_leaves(device, dtype, name):
    vocab_size = 1100
    case = _Case.random(4, vocab_size, dtype, device)
    for rule, limit in _RULES[name].items():
        getattr(case.rules, rule)[:] = limit
    stats, kept, _ = case.run(truncated=True)
    _, twin = case.twin(truncated=True)
    logits, ids = case.logits.cpu().float(), torch.arange(vocab_size).expand(4, -1)
    ours, theirs = (is_kept(logits, ids, k.floor.cpu(), k.last_tie.cpu()) for k in (kept, twin))
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(kept.log_total.cpu(), twin.log_total, rtol=SLACK, atol=SLACK)
    _assert_drawn_by_inverse_cdf(case, stats.tokens, theirs)
    scored = row_stats(case.logits.cpu(), case.rows.temperatures.cpu(), stats.tokens.cpu())
    torch.testing.assert_close(stats.logprobs.cpu(), scored.logprobs, rtol=SLACK, atol=SLACK)


def test_ties_at_the_edge_stay_in_order_of_ids(device):
    case = _Case.random(3, 600, torch.bfloat16, device)
    case.logits[:] = case.logits.round().clamp(-2, 2)  # five values, either zero among them
    case.rules.top_k[:] = torch.tensor([3, 200, 0], device=device)
    case.rules.top_p[:] = torch.tensor([1.0, 0.5, 0.37], device=device, dtype=torch.float64)
    _, kept, _ = case.run(truncated=True)
    _, twin = case.twin(truncated=True)
    logits, ids = case.logits.cpu().float(), torch.arange(600).expand(3, -1)
    ours, theirs = (is_kept(logits, ids, k.floor.cpu(), k.last_tie.cpu()) for k in (kept, twin))
    assert torch.equal(ours, theirs)


def test_a_flat_row_is_cut_right_though_every_chunk_may_stay(device):
    case = _Case.random(2, 6144, torch.float32, device, scale=0.01)
    case.rules.top_p[:] = 0.95
    stats, kept, workspace = case.run(truncated=True)
    assert (workspace.num_active == 48).all()
    _, twin = case.twin(truncated=True)
    counts = [(case.logits.cpu() >= k.floor.cpu()[:, None]).sum(-1) for k in (kept, twin)]
    assert (counts[0] - counts[1]).abs().max() <= 1
    _assert_drawn_by_inverse_cdf(case, stats.tokens, case.logits.cpu() >= kept.floor.cpu()[:, None])


def test_a_peaked_row_looks_at_few_chunks(device):
    case = _Case.random(2, 5000, torch.float32, device)
    case.rules.top_k[:] = 4
    _, _, workspace = case.run(truncated=True)
    assert (workspace.num_active == 4).all()


def test_rows_without_a_rule_and_greedy_rows_stay_as_they_are(device):
    case = _Case.random(3, 300, torch.float32, device)
    case.rows.choices[1] = Choice.GREEDY
    case.rules.top_k[2] = 5
    plain, _, _ = case.run()
    stats, kept, _ = case.run(truncated=True)
    assert all(torch.equal(x[:2], y[:2]) for x, y in zip(stats, plain, strict=True))
    assert torch.equal(kept.log_total[:2], plain.log_total[:2])
    assert kept.log_total[2] < plain.log_total[2]


@pytest.mark.slow
def test_draws_follow_the_distribution(device):
    vocab_size, n = 5, 1500
    case = _Case.random(n, vocab_size, torch.float32, device)
    case.logits[:] = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5], device=device)
    case.rows.temperatures[:] = 0.8
    case.rules.top_k[:] = 4
    u = uniforms(case.rows.seeds.cpu(), case.rows.positions.cpu())
    few = 12 if device == "cpu" else n  # the interpreter takes its time; its draws are its twin's
    some = _Case(case.logits[:few], SamplingRows(*(x[:few] for x in case.rows)), case.rules.rows(slice(few)))
    tokens = some.run(truncated=True)[0].tokens.cpu()
    expected = (case.logits[0].cpu().double() / 0.8).softmax(-1)
    expected[2] = 0.0
    expected /= expected.sum()
    assert torch.equal(tokens, torch.searchsorted(expected.cumsum(-1), u[:few], right=True))
    counts = torch.bincount(torch.searchsorted(expected.cumsum(-1), u, right=True), minlength=vocab_size)
    possible = expected > 0
    chi_square = ((counts - n * expected)[possible] ** 2 / (n * expected[possible])).sum()
    assert chi_square < 21.1  # 3 degrees of freedom: one seed in ten thousand; the seed is fixed


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_most_likely_tokens_are_those_of_the_twin(device, dtype):
    case = _Case.random(3, 700, dtype, device)
    case.logits[1] = case.logits[1].round()  # many ties
    case.logits[2, 3:] = -torch.inf  # too few with any weight
    stats, _, workspace = case.run()
    ids, logprobs = torch.empty(3, 9, dtype=torch.int32, device=device), torch.empty(3, 9, device=device)
    top_tokens(case.logits, case.rows.temperatures, workspace, stats, ids, logprobs)
    assert ids.tolist() == most_likely(case.logits.cpu().float(), 9).tolist()
    exact = (case.logits.cpu().double() / case.rows.temperatures.cpu().double()[:, None]).log_softmax(-1)
    torch.testing.assert_close(logprobs.cpu().double(), exact.gather(1, ids.cpu().long()), rtol=SLACK, atol=SLACK)


def test_all_tokens_of_a_small_vocabulary_can_be_asked_for(device):
    case = _Case.random(1, 130, torch.bfloat16, device)
    stats, _, workspace = case.run()
    ids, logprobs = torch.empty(1, 130, dtype=torch.int32, device=device), torch.empty(1, 130, device=device)
    top_tokens(case.logits, case.rows.temperatures, workspace, stats, ids, logprobs)
    assert ids.tolist() == most_likely(case.logits.cpu().float(), 130).tolist()


def test_most_likely_tokens_that_truncation_cuts_have_no_probability(device):
    case = _Case.random(2, 300, torch.float32, device)
    case.rules.top_k[:] = 3
    stats, kept, workspace = case.run(truncated=True)
    ids, logprobs = torch.empty(2, 5, dtype=torch.int32, device=device), torch.empty(2, 5, device=device)
    top_tokens(case.logits, case.rows.temperatures, workspace, stats, ids, logprobs, kept)
    assert (logprobs[:, 3:] == -torch.inf).all()
    torch.testing.assert_close(logprobs[:, :3].exp().sum(-1).cpu(), torch.ones(2), rtol=1e-5, atol=1e-5)


def test_more_tokens_than_there_are_cannot_be_asked_for(device):
    case = _Case.random(1, 4, torch.float32, device)
    stats, _, workspace = case.run()
    with pytest.raises(ValueError, match=r"k in \[1, 4\]"):
        top_tokens(
            *(case.logits, case.rows.temperatures, workspace, stats),
            *(torch.empty(1, 5, dtype=torch.int32, device=device), torch.empty(1, 5, device=device)),
        )
