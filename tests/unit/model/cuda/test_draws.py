"""Draws on a device beside those of the CPU, whatever rows stand side by side."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_engine import SamplingParams
from rollout_engine.base.messages import NewSequence
from rollout_engine.model.cuda import sampler
from rollout_engine.model.cuda.draws import CudaDraws, Draws, DrawSettings, special_columns
from rollout_engine.model.cuda.edit_records import EditRecords
from rollout_engine.model.cuda.sampler import CudaSampler, to_output
from rollout_engine.model.cuda.upload import Download, upload
from rollout_engine.model.sampling.entropies import fill_entropies
from rollout_engine.model.sampling.logit_edits import LogitEdits
from rollout_engine.model.sampling.row_edits import RowEdits
from rollout_engine.model.sampling.sampler import sample

VOCAB_SIZE = 300
SLACK = 2.0**-18
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning", "ignore:divide by zero encountered in log:RuntimeWarning"
)
any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 0, 5, 400]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    logit_bias=st.sampled_from([None, {3: 9.0, 200: 5.0}]),
    allowed_token_ids=st.sampled_from([None, list(range(0, VOCAB_SIZE, 7))]),
    logprobs=st.sampled_from([None, 0, 2, 5]),
    logprobs_mode=st.sampled_from(["tempered", "raw", "processed"]),
    entropy=st.booleans(),
)


def draw_both(params, device, broken=None, seed=0):
    """(on the device, on the CPU) of random logits; those of row `broken` hold NaN."""
    sequences = [NewSequence(row, [row, row + 1, 3 * row], 2, each, seed=seed + row) for row, each in enumerate(params)]
    logits = torch.randn(len(params), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    if broken is not None:
        logits[broken % len(params), 5] = torch.nan
    edits = [LogitEdits.of(sequence, (), VOCAB_SIZE) for sequence in sequences]
    edited = [row for row, each in enumerate(edits) if each is not None]
    chosen = DrawSettings.of(sequences, np.arange(len(params))[::-1].copy())
    positions = np.full(len(params), 3)
    records = EditRecords(VOCAB_SIZE, 10, torch.device(device))
    special = special_columns(chosen.batch, edited, records.addresses([edits[row] for row in edited]))
    draws = Draws(sequences, chosen.batch, chosen.columns._replace(positions=positions), special, {})
    arrived = CudaDraws.of(draws, upload(draws.sent, torch.device(device)))
    last_tokens = torch.full((len(params),), -1, device=device)
    drawn = CudaSampler(VOCAB_SIZE, torch.device(device)).draw(logits.to(device), arrived, last_tokens)
    ours = to_output(draws, Download(drawn).wait())
    batch = chosen.batch.at(positions)
    assert [max(token, 0) for row, token in enumerate(ours.token_ids) if row not in ours.errors] == [
        token for row, token in enumerate(last_tokens.tolist()[::-1]) if row not in ours.errors
    ]
    theirs = sample(logits, batch, RowEdits({row: edits[row] for row in edited}))
    fill_entropies(theirs, logits, batch)
    return ours, theirs


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    params=st.lists(any_params, min_size=1, max_size=5),
    broken=st.one_of(st.none(), st.integers(0, 4)),
    seed=st.integers(0, 50),
)
def test_any_mix_of_rows_is_drawn_and_told_as_on_the_cpu(device, params, broken, seed):
    ours, theirs = draw_both(params, device, broken, seed)
    assert ours.token_ids == theirs.token_ids
    assert ours.errors == theirs.errors
    sound = [row for row in range(len(params)) if row not in ours.errors]
    for mine, other in ((ours.logprobs, theirs.logprobs), (ours.kept_logprob_mass, theirs.kept_logprob_mass)):
        assert (mine is None) == (other is None)
        if other is not None:
            np.testing.assert_allclose(np.array(mine)[sound], np.array(other)[sound], rtol=SLACK, atol=SLACK)
    assert (ours.entropies is None) == (theirs.entropies is None)
    if theirs.entropies is not None:
        np.testing.assert_array_equal(ours.entropies[sound], theirs.entropies[sound])
    assert (ours.top_logprobs is None) == (theirs.top_logprobs is None)
    if theirs.top_logprobs is not None:
        np.testing.assert_array_equal(ours.top_logprobs[0], theirs.top_logprobs[0])
        np.testing.assert_allclose(ours.top_logprobs[1], theirs.top_logprobs[1], rtol=SLACK, atol=SLACK)
        np.testing.assert_array_equal(ours.sampled_ranks, theirs.sampled_ranks)


@pytest.mark.slow
def test_edited_rows_are_copied_a_bounded_number_at_a_time(device, monkeypatch):
    asked = {"presence_penalty": 1.0, "top_k": 5, "logprobs": 2, "logprobs_mode": "processed"}
    params = [SamplingParams(**asked), SamplingParams(logprobs=0), *[SamplingParams(**asked)] * 4]
    at_once, _ = draw_both(params, device)
    sizes, edit = [], sampler.edit
    monkeypatch.setattr(sampler, "_EDITED_NUMEL", 2 * VOCAB_SIZE + 1)
    monkeypatch.setattr(sampler, "edit", lambda *args: sizes.append(len(args[-1])) or edit(*args))
    in_slices, _ = draw_both(params, device)
    assert sizes == [2, 2, 1]
    assert (in_slices.token_ids, in_slices.logprobs, in_slices.kept_logprob_mass) == (
        at_once.token_ids,
        at_once.logprobs,
        at_once.kept_logprob_mass,
    )
    assert all(np.array_equal(*pair) for pair in zip(in_slices.top_logprobs, at_once.top_logprobs, strict=True))


def test_a_row_has_the_same_bits_beside_edited_ones(device):
    plain = [SamplingParams(logprobs=0), SamplingParams(logprobs=0, top_p=0.9)]
    alone, _ = draw_both(plain, device)
    beside, _ = draw_both([*plain, SamplingParams(presence_penalty=1.0, logprobs=3)], device)
    assert beside.token_ids[:1] == alone.token_ids[:1]
    assert beside.logprobs[:1] == alone.logprobs[:1]
