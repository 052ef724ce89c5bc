"""Rows that grammars restrict: which token is drawn, with which probability."""

import threading

import numpy as np
import pytest
import torch
from scipy import stats

from rollout_engine import SamplingParams
from rollout_engine.base.messages import NewSequence
from rollout_engine.grammars import compiler
from rollout_engine.grammars.compiler import GrammarCompiler
from rollout_engine.grammars.tokenizer_file import serialize_tokenizer
from rollout_engine.grammars.vocabulary import Vocabulary
from rollout_engine.model.sampling.logit_edits import LogitEdits
from rollout_engine.model.sampling.row_edits import RowEdits
from rollout_engine.model.sampling.sampler import NONE_LEFT, sample
from rollout_engine.model.sampling.sampling_batch import SamplingBatch
from rollout_engine.testing import byte_tokenizer

VOCAB_SIZE, END = 259, 2
LETTERS = byte_tokenizer().encode("abcdefgh")
FORM = {"regex": "[a-h]{3,}"}


@pytest.fixture
def grammars():
    made = GrammarCompiler(lambda: Vocabulary(serialize_tokenizer(byte_tokenizer()), VOCAB_SIZE, [END]))
    yield made
    made.close()


def batch_of(params, first_seed=0):
    return SamplingBatch.from_tasks(params, [first_seed + row for row in range(len(params))], [3] * len(params))


def edits_of(params, grammars):
    made = RowEdits()
    for row, each in enumerate(params):
        sequence = NewSequence(row, [5, 6, 7], 3, each, seed=0, eos_token_ids=[END])
        edits = LogitEdits.of(sequence, (), VOCAB_SIZE, grammars=grammars)
        if edits is not None:
            made[row] = edits
    return made


def logits_of(num_rows, letters=0.0, seed=0):
    """Random rows, in which letters that the form allows are more likely by `letters`."""
    rows = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2
    rows[:, LETTERS] += letters
    return rows


def restricted(**settings):
    return SamplingParams(structured_outputs=FORM, logprobs=0, **settings)


@pytest.mark.parametrize("fate", ["late", "panics"])
@pytest.mark.parametrize("settings", [{}, dict(temperature=0.0), dict(top_k=5), dict(logprobs_mode="processed")])
def test_a_grammar_that_is_not_compiled_in_time_fails_its_own_row_alone(monkeypatch, fate, settings):
    def load():
        if fate == "panics":
            raise BaseException("a panic")
        may_load.wait()
        raise ValueError("too late")

    monkeypatch.setattr(compiler, "_MAX_COMPILE_SECONDS", 0.0 if fate == "late" else 60.0)
    may_load, grammars, logits = threading.Event(), GrammarCompiler(load), logits_of(3)
    plain = SamplingParams(logprobs=0)
    params = [restricted(**settings), plain, SamplingParams(structured_outputs={"regex": "[0-9]"}, **settings)]
    try:
        out = sample(logits.clone(), batch_of(params), edits_of(params, grammars))
    finally:
        may_load.set()
        grammars.close()
    free = sample(logits, batch_of([plain] * 3))
    reason = "it was not compiled in 0 s" if fate == "late" else "BaseException: a panic"
    assert set(out.errors) == {0, 2} and all(reason in error for error in out.errors.values())
    assert (out.token_ids[1], out.logprobs[1]) == (free.token_ids[1], free.logprobs[1])


@pytest.mark.quick(1)
@pytest.mark.parametrize("letters", [0.0, 2.0, 12.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_have_the_probabilities_of_a_draw_from_the_allowed_ones(grammars, letters, temperature):
    row, found = logits_of(1, letters), []
    params = [restricted(temperature=temperature)] * 500
    for start in range(0, 8_000, 500):
        out = sample(row.expand(500, -1), batch_of(params, start), edits_of(params, grammars))
        assert not out.errors
        found += out.token_ids
    counts = np.bincount(found, minlength=VOCAB_SIZE)[LETTERS]
    assert counts.sum() == len(found)
    expected = torch.softmax(row[0, LETTERS].double() / temperature, 0).numpy() * len(found)
    rare = expected < 10  # too few for the test
    pooled = [np.append(each[~rare], each[rare].sum() + 1e-9) for each in (counts, expected)]
    assert stats.chisquare(*pooled).pvalue > 1e-3


def test_a_token_that_would_have_been_drawn_freely_stays_where_it_is_allowed(grammars):
    logits, params = logits_of(300, 4.0), [restricted()] * 300
    free = sample(logits, batch_of([SamplingParams(logprobs=0)] * 300))
    out = sample(logits, batch_of(params), edits_of(params, grammars))
    is_allowed = [token in LETTERS for token in free.token_ids]
    assert 50 < sum(is_allowed) < 250
    for ours, theirs, stays in zip(
        zip(out.token_ids, out.logprobs, strict=True),
        zip(free.token_ids, free.logprobs, strict=True),
        is_allowed,
        strict=True,
    ):
        assert ours == theirs if stays else (ours[0] in LETTERS and ours != theirs)
    expected = torch.log_softmax(logits.double(), -1)[range(300), out.token_ids]
    np.testing.assert_allclose(out.logprobs, expected, atol=1e-5)


@pytest.mark.quick(2)
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.7}, {"top_k": 5}, {"temperature": 0.0}], ids=str)
def test_no_log_prob_mode_changes_a_token_and_processed_ones_are_of_the_allowed(grammars, settings):
    logits, found = logits_of(200, 3.0), {}
    for mode in ("tempered", "raw", "processed"):
        params = [restricted(logprobs_mode=mode, **settings)] * 200
        found[mode] = sample(logits, batch_of(params), edits_of(params, grammars))
        assert not found[mode].errors
    assert found["tempered"].token_ids == found["raw"].token_ids == found["processed"].token_ids
    if not settings:
        places = [LETTERS.index(token) for token in found["processed"].token_ids]
        expected = torch.log_softmax(logits[:, LETTERS].double(), -1)[range(200), places]
        np.testing.assert_allclose(found["processed"].logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.7}, {"temperature": 0.0}], ids=str)
def test_a_row_is_drawn_alike_alone_and_beside_others(grammars, settings):
    logits = logits_of(30, 3.0)
    params = [restricted(**settings) if row % 3 else SamplingParams(logprobs=0, top_p=0.9) for row in range(30)]
    batch, edits = batch_of(params), edits_of(params, grammars)
    together = sample(logits, batch, edits)
    for row in range(30):
        index = np.array([row])
        alone = sample(logits[row : row + 1], batch.rows(index), RowEdits({0: edits[row]} if row in edits else {}))
        assert alone.token_ids == [together.token_ids[row]] and alone.logprobs == [together.logprobs[row]]
        if alone.kept_logprob_mass is not None:
            assert alone.kept_logprob_mass == [together.kept_logprob_mass[row]]


def test_tokens_that_a_device_has_drawn_are_kept_where_they_are_allowed(grammars):
    logits, params = logits_of(3), [restricted(logprobs_mode="processed")] * 3
    given = torch.tensor([LETTERS[1], 200, LETTERS[3]])
    out = sample(logits, batch_of(params), edits_of(params, grammars), given)
    assert out.token_ids[::2] == [LETTERS[1], LETTERS[3]] and out.token_ids[1] in LETTERS


def test_a_row_without_an_allowed_token_that_can_be_drawn_says_so(grammars):
    logits, params = logits_of(3), [restricted()] * 3
    logits[1, LETTERS], logits[2, 0] = -torch.inf, torch.nan
    out = sample(logits, batch_of(params), edits_of(params, grammars))
    assert out.token_ids[0] in LETTERS and out.token_ids[1:] == [-1, -1]
    assert out.errors[1] == NONE_LEFT and "NaN" in out.errors[2]


def test_more_or_fewer_threads_in_later_steps_draw_the_same(grammars, thread_count):
    params, logits = [restricted()] * 24, logits_of(24, 1.0)
    expected = sample(logits, batch_of(params), edits_of(params, grammars))
    batch, edits = batch_of(params), edits_of(params, grammars)
    for count in (1, 3, 2, 1):
        thread_count(count)
        assert sample(logits, batch, edits) == expected
