import numpy as np
import pytest
import torch

from rollout_engine.kernels.draw import Truncation, draw
from rollout_engine.kernels.truncation import is_kept, most_likely


def cut_tail(logits, truncation):
    """Set tokens cut by the edges of a draw to -inf, in place."""
    n = len(logits)
    ones, u, sampled = torch.ones(n), torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.bool)
    _, kept = draw(logits, ones, u, sampled, truncation)
    ids = torch.arange(logits.shape[1]).expand_as(logits)
    logits[~is_kept(logits, ids, kept.floor, kept.last_tie)] = -torch.inf


def _kept_by_sorting(logits, temperature, top_k, top_p, min_p):
    """The definition, one row: sort all tokens in float64, apply the rules one after the other, renormalise between."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-logits, kind="stable")
    kept = order[:top_k] if top_k else order
    if top_p < 1:
        shares = weights[kept] / weights[kept].sum()
        kept = kept[: 1 + int(np.searchsorted(np.cumsum(shares.astype(np.longdouble)), top_p))]
    kept = kept[weights[kept] >= min_p]
    mask = np.zeros(len(logits), bool)
    mask[kept] = True
    return mask


def _wrong_rows(logits, temperature, top_k, top_p, min_p):
    cut = logits.clone()
    cut_tail(cut, Truncation(temperature, top_k, top_p, min_p))
    columns = zip(logits.numpy(), temperature.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    expected = torch.from_numpy(np.stack([_kept_by_sorting(*row) for row in columns]))
    finite = expected & logits.isfinite()
    assert torch.equal(cut[finite], logits[finite])
    return int((cut.isfinite() != finite).any(-1).sum())


def _columns(n, **settings):
    """Float64 columns but for top_k; a setting is a number or n of them."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    made = {name: torch.as_tensor(value).expand(n) for name, value in (defaults | settings).items()}
    return {name: column.long() if name == "top_k" else column.double() for name, column in made.items()}


@pytest.mark.quick(2)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(6000, 50), (3500, 259), (600, 1500), (60, 6000)])
def test_random_rows_keep_what_sorting_keeps(side, num_rows, vocab_size):
    g = torch.Generator().manual_seed(vocab_size)
    rand = torch.rand(5, num_rows, generator=g, dtype=torch.float64)
    logits = torch.randn(num_rows, vocab_size, generator=g) * (rand[0, :, None] * 6).float()
    third = num_rows // 3
    logits[:third] = logits[:third].round()  # many ties
    logits[third : 2 * third] = logits[third : 2 * third].bfloat16().float()
    columns = _columns(
        num_rows,
        temperature=rand[1] * 2 + 0.05,
        top_k=(rand[2] * 2 - 1).clamp(min=0) * (vocab_size + 2),
        top_p=(rand[3] * 2).clamp(1e-3, 1.0),
        min_p=(rand[4] - 0.5).clamp(min=0),
    )
    assert _wrong_rows(logits, **columns) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 2000},
        {"top_k": 49, "top_p": 0.5},
        {"top_p": 1e-9},
        {"top_p": 0.5},
        {"top_p": 1 - 1e-9},
        {"min_p": 1.0},
        {"min_p": 1e-9},
        {"top_p": 0.75, "min_p": 0.3, "temperature": 0.01},
        {"top_k": 3, "top_p": 0.99, "min_p": 0.01, "temperature": 100.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab_size", [50, 2000])
def test_adversarial_rows_keep_what_sorting_keeps(side, settings, vocab_size):
    flat = torch.zeros(vocab_size)
    one_hot = torch.full((vocab_size,), -torch.inf)
    one_hot[vocab_size // 2] = 3.0
    two_levels = flat.clone()
    two_levels[::3] = 1.0
    half_forbidden = torch.linspace(-3, 3, vocab_size)
    half_forbidden[::2] = -torch.inf
    steep = torch.linspace(50, -800, vocab_size)
    rows = torch.stack([flat, one_hot, two_levels, half_forbidden, steep, steep.flip(0), two_levels.flip(0)])
    assert _wrong_rows(rows, **_columns(len(rows), **settings)) == 0


def test_ties_at_the_edge_go_to_the_lowest_ids(side):
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 2.0, 0.0]])
    cut_tail(logits, Truncation(**_columns(1, top_k=4)))
    assert logits.isfinite().tolist() == [[True, True, True, False, True, False]]


def test_a_row_is_cut_alike_alone_and_among_others(side):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(600, 3000, generator=g).round(decimals=1)
    columns = _columns(600, top_p=torch.rand(600, generator=g), top_k=torch.randint(0, 3000, (600,), generator=g))
    together = logits.clone()
    cut_tail(together, Truncation(**columns))
    for i in range(0, 600, 37):
        alone = logits[i : i + 1].clone()
        cut_tail(alone, Truncation(**columns).rows(slice(i, i + 1)))
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("k", [1, 5, 40])
def test_most_likely_tokens_come_sorted_with_ties_by_id(k):
    logits = torch.randn(200, 40, generator=torch.Generator().manual_seed(k)).round()
    logits[0] = 0.0
    logits[1, 3:] = -torch.inf
    expected = np.argsort(-logits.numpy(), axis=-1, kind="stable")[:, :k]
    assert most_likely(logits, k).tolist() == expected.tolist()
