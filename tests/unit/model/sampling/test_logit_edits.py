"""Penalties, bias, processors and masks beside a slow reference that reads like their definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.model.sampling import sampler
from rollout_engine.model.sampling.logit_edits import LogitEdits
from rollout_engine.model.sampling.row_edits import RowEdits, edit
from rollout_engine.model.sampling.sampler import sample
from rollout_engine.model.sampling.sampling_batch import SamplingBatch
from tests.unit.model.edits_defined import EOS, VOCAB_SIZE, sequence, slow_edit, some_params, tokens


def edited(row, of, processors=()):
    edits = LogitEdits.of(of, processors, VOCAB_SIZE)
    copy = row.float()[None].clone()
    assert edit(copy, [edits]) == {}
    return copy[0]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 1000),
    params=st.lists(some_params, min_size=1, max_size=5),
    prompts=st.lists(tokens, min_size=5, max_size=5),
    outputs=st.lists(st.lists(st.integers(0, 5), max_size=8), min_size=5, max_size=5),
    bad_words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_combination_has_the_bits_of_the_definition(seed, params, prompts, outputs, bad_words, dtype):
    logits = (torch.randn(len(params), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)
    of = [
        sequence(prompt, output, params=each, bad_words=bad_words)
        for prompt, output, each in zip(prompts, outputs, params, strict=False)
    ]
    copy = logits.float().clone()
    edits = [LogitEdits(each, (), VOCAB_SIZE) for each in of]
    assert edit(copy, edits) == {}
    expected = torch.stack([slow_edit(row, each) for row, each in zip(logits, of, strict=True)])
    assert copy.numpy().tobytes() == expected.numpy().tobytes()


@settings(max_examples=100, deadline=None)
@given(
    prompt=tokens,
    output=tokens,
    draft=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30),
    params=some_params,
    bad_words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=3),
)
def test_edits_behind_a_draft_are_those_of_a_sequence_with_its_tokens(prompt, output, draft, params, bad_words):
    row = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    of = sequence(prompt, output, params=params, bad_words=bad_words)
    edits = LogitEdits(of, (), VOCAB_SIZE)
    for end in (len(draft), len(draft) // 2, 0, len(draft)):  # what was not drawn leaves no trace
        longer = sequence(prompt, output + draft[:end], params=params, bad_words=bad_words)
        found, expected = row[None].clone(), row[None].clone()
        assert edit(found, [edits.behind(draft[:end])]) == edit(expected, [LogitEdits(longer, (), VOCAB_SIZE)]) == {}
        assert found.numpy().tobytes() == expected.numpy().tobytes()


@settings(max_examples=50, deadline=None)
@given(prompt=tokens, output=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60), params=some_params)
def test_counts_kept_while_a_sequence_grows_equal_those_of_its_return_after_preemption(prompt, output, params):
    row = torch.linspace(-3, 3, VOCAB_SIZE)
    growing = sequence(prompt, params=params)
    edits = LogitEdits(growing, (), VOCAB_SIZE)
    for count, token in enumerate(output):
        kept = row[None].clone()
        edit(kept, [edits])
        anew = row[None].clone()
        edit(anew, [LogitEdits(sequence(prompt, output[:count], params=params), (), VOCAB_SIZE)])
        assert torch.equal(kept, anew)
        growing.token_ids.append(token)


def test_a_request_without_rules_has_no_edits():
    assert LogitEdits.of(sequence([1], params=SamplingParams(logit_bias={}, bad_words=[])), (), VOCAB_SIZE) is None


def test_min_tokens_edits_only_until_it_is_reached():
    growing = sequence([1], params=SamplingParams(min_tokens=2))
    edits = LogitEdits.of(growing, (), VOCAB_SIZE)
    active = []
    for _ in range(3):
        active.append(edits.active_at(len(growing.token_ids)))
        growing.token_ids.append(5)
    assert active == [True, True, False]


def test_a_bad_word_is_stopped_at_its_last_token_and_the_prompt_is_no_part_of_it():
    row = torch.zeros(VOCAB_SIZE)
    for output, banned in (([], []), ([5], []), ([5, 6], [7]), ([6, 5], []), ([4, 5, 6], [7])):
        of = sequence([5, 6], output, params=SamplingParams(), bad_words=[[5, 6, 7]])
        assert edited(row, of).isneginf().nonzero()[:, 0].tolist() == banned


def draws(logits, params, *, of, num=40_000, processors=()):
    """Tokens of one row, many times over."""
    one = SamplingBatch.from_tasks([params], [3], [0])
    found = []
    for start in range(0, num, 1000):
        batch = one.rows(np.zeros(1000, np.int64)).at(np.arange(start, start + 1000))
        edits = RowEdits.fromkeys(range(1000), LogitEdits.of(of, processors, VOCAB_SIZE))
        found += sample(logits.expand(1000, -1), batch, edits).token_ids
    return np.bincount(found, minlength=VOCAB_SIZE)


@pytest.mark.quick(1)
@pytest.mark.parametrize("extra", [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_draws_follow_the_edited_distribution(some_of, extra):
    params = SamplingParams(
        temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.3, logit_bias={7: 1.0}, min_tokens=9, **extra
    )
    of = sequence([1, 2, 3], [5, 5, 9], params=params, bad_words=[[9, 4], [11]])
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    counts = draws(logits, params, of=of, num=some_of(40_000))
    weights = np.exp(slow_edit(logits[0], of).double().numpy() / 0.8)
    order = np.argsort(-weights, kind="stable")
    kept = order[: params.top_k or None]
    if params.top_p < 1:
        kept = kept[: 1 + int(np.searchsorted(np.cumsum(weights[kept]) / weights[kept].sum(), params.top_p))]
    kept = kept[weights[kept] >= params.min_p * weights.max()]
    kept = kept[weights[kept] > 0]
    assert counts.sum() == counts[kept].sum()
    assert stats.chisquare(counts[kept], weights[kept] / weights[kept].sum() * counts.sum()).pvalue > 1e-6


def one_row(logits, params, of, processors=()):
    batch = SamplingBatch.from_tasks([params], [3], [len(of.token_ids)])
    return sample(logits, batch, RowEdits({0: LogitEdits.of(of, processors, VOCAB_SIZE)}))


@pytest.mark.parametrize("mode", ["tempered", "raw", "processed"])
def test_only_processed_logprobs_know_of_edits(mode):
    params = SamplingParams(
        temperature=0.5, repetition_penalty=2.0, logit_bias={8: 2.0}, logprobs=VOCAB_SIZE, logprobs_mode=mode
    )
    of = sequence([1, 2], [3, 4], params=params)
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(2)) * 2
    out = one_row(logits, params, of)
    source = slow_edit(logits[0], of) if mode == "processed" else logits[0]
    expected = torch.log_softmax(source.double() / (1.0 if mode == "raw" else 0.5), -1)
    ids, values = (torch.from_numpy(column[0]) for column in out.top_logprobs)
    assert ids.tolist() == source.numpy().argsort(kind="stable")[::-1].tolist()
    torch.testing.assert_close(values.double(), expected[ids.long()], atol=1e-6, rtol=1e-5)
    assert out.logprobs[0] == values[ids == out.token_ids[0]].item()


def test_kept_mass_is_the_tempered_mass_of_the_tokens_that_could_be_drawn():
    params = SamplingParams(
        top_k=3, logprobs=0, frequency_penalty=2.0, presence_penalty=2.0, allowed_token_ids=[1, 2, 3, 4]
    )
    of = sequence([0], [1, 1], params=params)
    logits = torch.tensor([[9.0, 5.0, 4.0, 3.0, 2.0, *[0.0] * (VOCAB_SIZE - 5)]])
    out = one_row(logits, params, of)
    expected = torch.log_softmax(logits.double(), -1)[0, [2, 3, 4]].logsumexp(-1)
    assert out.kept_logprob_mass == [pytest.approx(float(expected), abs=1e-6)]


def test_greedy_takes_the_largest_edited_logit():
    params = SamplingParams(temperature=0, logit_bias={4: 1.0, 6: 1.0})
    out = one_row(torch.zeros(1, VOCAB_SIZE), params, sequence([1], params=params))
    assert out.token_ids == [4]


def test_rows_without_edits_keep_their_bits_beside_edited_ones():
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    params = [
        SamplingParams(logprobs=0),
        SamplingParams(logprobs=0, repetition_penalty=1.2),
        SamplingParams(logprobs=0),
    ]
    batch = SamplingBatch.from_tasks(params, [1, 2, 3], [4, 5, 6])
    before = logits.clone()
    plain = sample(logits, batch)
    out = sample(logits, batch, RowEdits({1: LogitEdits.of(sequence([1], params=params[1]), (), VOCAB_SIZE)}))
    assert torch.equal(logits, before)
    for row in (0, 2):
        assert (out.token_ids[row], out.logprobs[row]) == (plain.token_ids[row], plain.logprobs[row])


def test_edited_rows_are_copied_a_bounded_number_at_a_time(monkeypatch):
    params = SamplingParams(presence_penalty=1.0, top_k=5, logprobs=2, logprobs_mode="processed")
    logits = torch.randn(10, VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
    batch = SamplingBatch.from_tasks([params] * 10, list(range(10)), [3] * 10)
    edits = {row: LogitEdits.of(sequence([row], [row], params=params), (), VOCAB_SIZE) for row in range(10)}
    at_once = sample(logits, batch, RowEdits(edits))
    sizes = []
    monkeypatch.setattr(sampler, "_EDITED_NUMEL", 3 * VOCAB_SIZE + 1)
    monkeypatch.setattr(sampler, "edit", lambda copy, some: sizes.append(len(copy)) or edit(copy, some))
    in_slices = sample(logits, batch, RowEdits(edits))
    assert sizes == [3, 3, 3, 1]
    assert (in_slices.token_ids, in_slices.logprobs, in_slices.kept_logprob_mass) == (
        at_once.token_ids,
        at_once.logprobs,
        at_once.kept_logprob_mass,
    )
    assert all(np.array_equal(*pair) for pair in zip(in_slices.top_logprobs, at_once.top_logprobs, strict=True))


class Processor:
    def __init__(self, apply):
        self._apply = apply

    def wants(self, params):
        return params.extra_args is not None

    def apply(self, logits, sequence):
        return self._apply(logits, sequence)


WANTED = SamplingParams(extra_args={"k": 1}, logit_bias={3: 1.0}, allowed_token_ids=[3, 4, 5])


def test_a_processor_sees_its_sequence_after_the_bias_and_cannot_undo_a_mask():
    seen = []

    def apply(logits, view):
        seen.append((logits.tolist(), view.token_ids, view.output_token_ids, view.params.extra_args))
        logits[:] = 7.0
        return logits

    result = edited(torch.zeros(VOCAB_SIZE), sequence([1, 2], [9], params=WANTED), [Processor(apply)])
    assert seen == [([0.0] * 3 + [1.0] + [0.0] * (VOCAB_SIZE - 4), (1, 2, 9), (9,), {"k": 1})]
    assert result[3:6].tolist() == [7.0] * 3
    assert result.isneginf().sum() == VOCAB_SIZE - 3


def test_processors_run_in_order_and_may_return_another_tensor():
    chain = [Processor(lambda logits, view: (logits + 2).double()), Processor(lambda logits, view: logits * 3)]
    of = sequence([1], params=SamplingParams(extra_args={}))
    assert edited(torch.ones(VOCAB_SIZE), of, chain).tolist() == [9.0] * VOCAB_SIZE


def test_a_processor_that_does_not_want_a_sequence_costs_it_nothing():
    assert LogitEdits.of(sequence([1], params=SamplingParams()), [Processor(None)], VOCAB_SIZE) is None


def broken(logits, view):
    raise KeyError("oops")


@pytest.mark.parametrize(
    "apply, words",
    [
        (broken, "KeyError: 'oops'"),
        (lambda logits, view: None, "not None"),
        (lambda logits, view: logits[:-1], r"not torch.float32 \[22\]"),
        (lambda logits, view: logits.long(), "not torch.int64"),
        (lambda logits, view: logits * math.nan, "returned NaN"),
        (lambda logits, view: logits + math.inf, r"returned NaN or \+inf"),
    ],
)
def test_a_processor_that_fails_fails_its_own_row_only(apply, words):
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
    params = [SamplingParams(extra_args={}), SamplingParams()]
    batch = SamplingBatch.from_tasks(params, [1, 2], [1, 1])
    edits = LogitEdits.of(sequence([1], params=params[0]), [Processor(apply)], VOCAB_SIZE)
    out = sample(logits, batch, RowEdits({0: edits}))
    assert list(out.errors) == [0]
    assert out.token_ids == [-1, sample(logits, batch).token_ids[1]]
    with pytest.raises(AssertionError, match=f"test_logit_edits:Processor failed in apply: .*{words}"):
        raise AssertionError(out.errors[0])


def test_a_processor_that_fails_to_say_what_it_wants_fails_its_row():
    class Rude(Processor):
        def wants(self, params):
            raise ValueError("no")

    edits = LogitEdits.of(sequence([1], params=SamplingParams()), [Rude(None)], VOCAB_SIZE)
    assert "failed in wants: ValueError: no" in edit(torch.zeros(1, VOCAB_SIZE), [edits])[0]


def test_forbidding_every_token_is_an_error_of_its_own():
    params = SamplingParams(allowed_token_ids=[EOS], min_tokens=1, top_k=2, logprobs=1, logprobs_mode="processed")
    out = one_row(torch.zeros(1, VOCAB_SIZE), params, sequence([1], params=params))
    assert out.token_ids == [-1]
    assert "allowed_token_ids" in out.errors[0]
