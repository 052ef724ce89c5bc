import numpy as np
import pytest
import torch
from scipy import stats

from rollout_engine.base.messages import NewSequence
from rollout_engine.base.sampling_params import TRUNCATION_RULES, SamplingParams
from rollout_engine.kernels.draw import CHUNK, draw
from rollout_engine.kernels.row_stats import Truncation
from rollout_engine.kernels.token_logprobs import row_temperatures, token_logprobs
from rollout_engine.model.sampling.logit_edits import LogitEdits
from rollout_engine.model.sampling.row_edits import RowEdits
from rollout_engine.model.sampling.sampler import sample
from rollout_engine.model.sampling.sampling_batch import SamplingBatch

NUM_DRAWS = 200_000
ALPHA = 1e-6


def _logits(n, vocab_size, seed=0, dtype=torch.float32, scale=3.0):
    return (torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def _batch(params, *, seed=5):
    """One task per entry of `params`; seeds and positions differ from row to row."""
    n = len(params)
    return SamplingBatch.from_tasks(params, [seed + i for i in range(n)], list(range(n)))


def _edits(params, vocab_size, *, num_sampled, eos=()):
    """Of sequences that have sampled `num_sampled` tokens."""
    made = RowEdits()
    for row, each in enumerate(params):
        sequence = NewSequence(row, [0] * (1 + num_sampled), 1, each, seed=0, eos_token_ids=list(eos))
        edits = LogitEdits.of(sequence, (), vocab_size)
        if edits is not None and edits.active_at(1 + num_sampled):
            made[row] = edits
    return made


def _draw_with(u, logits, temperature=1.0):
    """The token that each uniform of `u` selects from the same row."""
    rows = logits.expand(len(u), -1)
    uniforms, sampled = torch.as_tensor(u, dtype=torch.float64), torch.zeros(len(u), dtype=torch.bool)
    return draw(rows, row_temperatures(temperature, rows), uniforms, sampled)[0].tokens


def _exact_probabilities(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    scaled = row.double().numpy() / temperature
    weights = np.exp(scaled - scaled.max())
    kept = np.argsort(-weights, kind="stable")[: top_k or None]
    if top_p < 1:
        shares = np.cumsum(weights[kept]) / weights[kept].sum()
        kept = kept[: 1 + int(np.searchsorted(shares, top_p))]
    kept = kept[weights[kept] >= min_p]
    probabilities = np.zeros(len(scaled))
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


def _many_draws(row, settings, seed, num):
    """Tokens from one row: one sequence, running positions."""
    params = SamplingParams(**settings)
    tokens = []
    for start in range(0, num, 10_000):
        one = SamplingBatch.from_tasks([params], [seed], [0])
        batch = one.rows(np.zeros(10_000, np.int64)).at(np.arange(start, start + 10_000))
        tokens += sample(row.expand(10_000, -1), batch).token_ids
    return np.array(tokens)


CONFIGURATIONS = [
    (vocab_size, settings)
    for vocab_size in (7, 64, 300)
    for settings in (
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 40, "top_p": 0.9, "temperature": 1.3},
        {"top_p": 0.95, "min_p": 0.02, "temperature": 0.8},
    )
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("vocab_size", "settings"), CONFIGURATIONS, ids=str)
def test_draws_follow_the_exact_distribution(some_of, vocab_size, settings):
    row, num = _logits(1, vocab_size, seed=vocab_size, scale=1.5), some_of(NUM_DRAWS)
    expected = _exact_probabilities(row[0], **settings) * num
    counts = np.bincount(_many_draws(row, settings, vocab_size, num), minlength=vocab_size)
    assert counts[expected == 0].sum() == 0
    large = expected >= 5
    observed = [*counts[large], counts[~large].sum()]
    wanted = [*expected[large], expected[~large].sum()]
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) > 1:
        assert stats.chisquare(observed, wanted).pvalue > ALPHA


def test_neighbouring_positions_draw_independently():
    row = _logits(1, 8, seed=1, scale=0.7)
    tokens = _many_draws(row, {}, 99, NUM_DRAWS)
    table = np.zeros((8, 8))
    np.add.at(table, (tokens[:-1], tokens[1:]), 1)
    assert stats.chi2_contingency(table).pvalue > ALPHA


def test_no_uniform_selects_a_token_of_zero_probability():
    lowest, highest = 0.0, 1 - 2**-53
    for vocab_size in (1, 5, CHUNK, CHUNK + 1, 1000):
        for possible in ([0], [vocab_size - 1], [vocab_size // 2], sorted({0, vocab_size // 3, vocab_size - 1})):
            row = torch.full((1, vocab_size), -torch.inf)
            row[0, possible] = torch.linspace(1.0, -60.0, len(possible))
            tokens = _draw_with([lowest, 1e-300, 0.5, 1 - 2**-30, highest], row)
            assert set(tokens.tolist()) <= set(possible)
            assert tokens[0] == possible[0]


def test_uniforms_select_the_token_where_the_cumulative_distribution_passes_them():
    row = _logits(1, 1000, seed=2)
    cdf = torch.softmax(row[0].double(), -1).cumsum(-1)
    u = np.random.default_rng(0).random(5000)
    expected = torch.searchsorted(cdf, torch.from_numpy(u), right=True)
    assert torch.equal(_draw_with(u, row), expected)


def _mixed_params(n, **settings):
    """n requests of many kinds, the same for the same arguments."""
    chooser = np.random.default_rng(n)
    return [
        SamplingParams(
            temperature=float(chooser.choice([0.0, 0.5, 1.0, 1.4])),
            top_k=int(chooser.choice([0, 0, 1, 20])),
            top_p=float(chooser.choice([1.0, 1.0, 0.9])),
            min_p=float(chooser.choice([0.0, 0.0, 0.05])),
            min_tokens=int(chooser.choice([0, 5])),
            stop_token_ids=[3, 4],
            repetition_penalty=float(chooser.choice([1.0, 1.0, 1.3])),
            frequency_penalty=float(chooser.choice([0.0, 0.0, -1.5])),
            logit_bias=[None, None, {0: 4.0, 7: -2.0}][chooser.integers(3)],
            allowed_token_ids=[None, None, list(range(1, 200))][chooser.integers(3)],
            logprobs=int(chooser.choice([0, 4])),
            logprobs_mode=str(chooser.choice(["tempered", "raw", "processed"])),
            **settings,
        )
        for _ in range(n)
    ]


def _pick(batch, rows):
    return batch.rows(np.array(rows))


def _pick_edits(edits, rows):
    return RowEdits({place: edits[row] for place, row in enumerate(rows) if row in edits})


def _result(out, i, num_top):
    """Everything about one row, as bits."""
    top = [column[i, :num_top].tobytes() for column in out.top_logprobs] if num_top else []
    kept = None if out.kept_logprob_mass is None else out.kept_logprob_mass[i]
    return out.token_ids[i], np.float32(out.logprobs[i]).tobytes(), kept or 0.0, top


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [259, 5003])
def test_a_row_gives_the_same_bits_alone_and_in_any_company(vocab_size, dtype):
    n = 64
    params = _mixed_params(n)
    logits, batch = _logits(n, vocab_size, dtype=dtype), _batch(params)
    edits = _edits(params, vocab_size, num_sampled=2, eos=[2])
    together = sample(logits, batch, edits)
    shuffled_rows = np.random.default_rng(1).permutation(n).tolist()
    shuffled = sample(logits[shuffled_rows], _pick(batch, shuffled_rows), _pick_edits(edits, shuffled_rows))
    for place, row in enumerate(shuffled_rows):
        alone = sample(logits[row : row + 1], _pick(batch, [row]), _pick_edits(edits, [row]))
        expected = _result(together, row, batch.num_top[row])
        assert _result(alone, 0, batch.num_top[row]) == expected
        assert _result(shuffled, place, batch.num_top[row]) == expected


def test_a_step_that_draws_nothing_has_every_column_empty():
    batch = SamplingBatch.from_tasks([], [], [])
    assert [len(column) for column in batch.truncation] == [0] * len(TRUNCATION_RULES)
    assert batch.truncates.shape == (0,)


def test_kernels_have_the_rules_of_sampling_params_in_their_order():
    assert Truncation._fields == ("temperature", *TRUNCATION_RULES)
    rules = _batch([SamplingParams(top_k=3), SamplingParams(top_p=0.5), SamplingParams(min_p=0.1)]).rules
    assert [column.tolist() for column in rules] == [[1.0] * 3, [3, 0, 0], [1.0, 0.5, 1.0], [0.0, 0.0, 0.1]]


def test_the_token_depends_on_seed_and_position_only():
    logits = torch.zeros(4, 5000)
    params = [SamplingParams()] * 4
    batch = SamplingBatch.from_tasks(params, [1, 1, 2, 2**64 - 1], [7, 8, 7, 7])
    tokens = sample(logits, batch).token_ids
    assert len(set(tokens)) == 4
    assert sample(logits[2:3], _pick(batch, [2])).token_ids == [tokens[2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"top_k": 9}, {"top_p": 0.7}, {"temperature": 0.0}], ids=str)
def test_tempered_logprobs_have_the_bits_of_token_logprobs(settings, dtype):
    logits = _logits(50, 700, dtype=dtype)
    settings = {"temperature": 0.7} | settings
    out = sample(logits, _batch([SamplingParams(logprobs=0, **settings)] * 50))
    expected = token_logprobs(logits, torch.tensor(out.token_ids), settings["temperature"])
    assert out.logprobs == expected.tolist()


def test_raw_logprobs_have_the_bits_of_token_logprobs_at_temperature_one():
    logits = _logits(50, 700)
    out = sample(logits, _batch([SamplingParams(logprobs=0, logprobs_mode="raw", temperature=0.3, top_k=9)] * 50))
    assert out.logprobs == token_logprobs(logits, torch.tensor(out.token_ids)).tolist()


def test_without_truncation_at_temperature_one_all_modes_have_the_same_bits():
    logits = _logits(40, 700)
    outs = [
        sample(logits, _batch([SamplingParams(logprobs=3, logprobs_mode=mode)] * 40))
        for mode in ("tempered", "raw", "processed")
    ]
    assert outs[0].logprobs == outs[1].logprobs == outs[2].logprobs
    assert all(np.array_equal(out.top_logprobs[1], outs[0].top_logprobs[1]) for out in outs)


def test_a_truncation_that_cuts_nothing_leaves_the_bits_alone():
    logits = _logits(40, 700)
    plain = sample(logits, _batch([SamplingParams(logprobs=0)] * 40))
    kept_all = sample(logits, _batch([SamplingParams(logprobs=0, logprobs_mode="processed", top_k=700)] * 40))
    assert kept_all.token_ids == plain.token_ids
    assert kept_all.logprobs == plain.logprobs
    assert kept_all.kept_logprob_mass == [0.0] * 40


@pytest.mark.parametrize("settings", [{"top_k": 12}, {"top_p": 0.6}, {"min_p": 0.2, "temperature": 1.5}], ids=str)
def test_processed_probabilities_sum_to_one_and_the_rest_has_none(settings):
    logits = _logits(30, 64, scale=1.0)
    params = SamplingParams(logprobs=64, logprobs_mode="processed", **settings)
    out = sample(logits, _batch([params] * 30))
    ids, logprobs = out.top_logprobs
    np.testing.assert_allclose(np.exp(logprobs.astype(np.float64)).sum(-1), 1, atol=1e-6)
    for i in range(30):
        exact = _exact_probabilities(logits[i], **settings)
        np.testing.assert_allclose(np.exp(logprobs[i]), exact[ids[i]], atol=1e-6)
        assert out.logprobs[i] == logprobs[i][ids[i].tolist().index(out.token_ids[i])]


def test_kept_mass_is_what_tempered_and_processed_differ_by():
    logits = _logits(60, 400)
    settings = [dict(top_k=10), dict(top_p=0.5, temperature=0.7), dict()] * 20
    outs = {
        mode: sample(logits, _batch([SamplingParams(logprobs=0, logprobs_mode=mode, **s) for s in settings]))
        for mode in ("tempered", "processed")
    }
    kept = np.array(outs["tempered"].kept_logprob_mass)
    difference = np.array(outs["tempered"].logprobs) - np.array(outs["processed"].logprobs)
    np.testing.assert_allclose(kept, difference, atol=3e-6)
    assert (kept[2::3] == 0).all()
    for i in (0, 1):
        cut = _exact_probabilities(logits[i], **settings[i]) > 0
        whole = _exact_probabilities(logits[i], temperature=settings[i].get("temperature", 1.0))
        assert kept[i] == pytest.approx(np.log(whole[cut].sum()), abs=1e-6)


def test_kept_mass_and_logprobs_are_absent_when_nobody_asks():
    out = sample(_logits(3, 50), _batch([SamplingParams()] * 3))
    assert out.logprobs is out.kept_logprob_mass is out.top_logprobs is None
    assert out.errors == {}


def test_top_logprobs_come_sorted_with_ties_by_id_and_the_bits_of_token_logprobs():
    logits = _logits(5, 30).round()
    out = sample(logits, _batch([SamplingParams(logprobs=k, temperature=0.9) for k in (3, 0, 30, 1, 8)]))
    ids, logprobs = out.top_logprobs
    assert ids.dtype == np.int32
    assert logprobs.dtype == np.float32
    for i, k in enumerate((3, 0, 30, 1, 8)):
        assert ids[i, :k].tolist() == np.argsort(-logits[i].numpy(), kind="stable")[:k].tolist()
        expected = token_logprobs(logits[i].expand(k, -1), torch.from_numpy(ids[i, :k]).long(), 0.9)
        assert logprobs[i, :k].tolist() == expected.tolist()


def test_more_top_logprobs_than_tokens_are_padded():
    ids, logprobs = sample(_logits(1, 3), _batch([SamplingParams(logprobs=5)])).top_logprobs
    assert ids[0, 3:].tolist() == [-1, -1]
    assert logprobs[0, 3:].tolist() == [-np.inf, -np.inf]


def test_greedy_takes_the_lowest_of_the_most_likely_ids_and_ignores_truncation():
    logits = _logits(30, 500).round()
    out = sample(logits, _batch([SamplingParams(temperature=0, top_p=0.1, logprobs=0)] * 30))
    assert out.token_ids == logits.numpy().argmax(-1).tolist()
    assert out.kept_logprob_mass is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_cannot_be_drawn_before_min_tokens(temperature):
    logits = torch.zeros(1, 10)
    logits[0, [2, 5]] = 30.0
    params = SamplingParams(temperature=temperature, min_tokens=4, stop_token_ids=[5, 4000], logprobs=0)
    batch = _batch([params] * 50)
    early, due = (_edits([params] * 50, 10, num_sampled=count, eos=[2]) for count in (3, 4))
    assert due == {}
    assert not {2, 5} & set(sample(logits.expand(50, -1), batch, early).token_ids)
    assert set(sample(logits.expand(50, -1), batch, due).token_ids) <= {2, 5}


def test_banned_ids_count_in_tempered_but_not_in_processed_logprobs():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    for mode, expected in (("tempered", 1 / 4), ("processed", 1 / 3)):
        params = SamplingParams(min_tokens=1, logprobs=0, logprobs_mode=mode)
        out = sample(logits, _batch([params]), _edits([params], 4, num_sampled=0, eos=[1]))
        assert np.exp(out.logprobs[0]) == pytest.approx(expected, rel=1e-6)


def test_truncation_counts_among_the_tokens_that_are_not_banned():
    logits = torch.tensor([[9.0, 3.0, 2.0, 1.0]])
    params = SamplingParams(top_k=2, min_tokens=1, logprobs=4, logprobs_mode="processed")
    out = sample(logits, _batch([params]), _edits([params], 4, num_sampled=0, eos=[0]))
    assert out.top_logprobs[0][0, :2].tolist() == [1, 2]
    assert np.isneginf(out.top_logprobs[1][0, 2:]).all()
    tempered = torch.softmax(logits.double(), -1)[0]
    assert out.kept_logprob_mass[0] == pytest.approx(float((tempered[1] + tempered[2]).log()), rel=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.5}, {"top_k": 3, "logprobs": 2}, {"temperature": 0}], ids=str)
def test_a_broken_row_is_an_error_of_its_own(settings, value):
    logits = _logits(6, 300)
    params = [SamplingParams(**({"logprobs": 0} | settings))] * 6
    expected = sample(logits, _batch(params))
    logits[2, 150] = value
    logits[4] = -torch.inf
    out = sample(logits, _batch(params))
    assert sorted(out.errors) == [2, 4]
    assert "NaN" in out.errors[2]
    assert [out.token_ids[i] for i in (2, 4)] == [-1, -1]
    for i in (0, 1, 3, 5):
        num_top = settings.get("logprobs", 0)
        assert _result(out, i, num_top) == _result(expected, i, num_top)


def test_banning_every_token_is_an_error_of_its_own():
    params = [SamplingParams(min_tokens=2, stop_token_ids=[0, 1]), SamplingParams()]
    out = sample(torch.zeros(2, 2), _batch(params), _edits(params, 2, num_sampled=0))
    assert list(out.errors) == [0]
    assert "min_tokens" in out.errors[0]
    assert out.token_ids[1] in (0, 1)
