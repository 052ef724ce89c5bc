"""Draws over pieces of a step's rows give what one draw over all of them gives, and hold one piece at a time."""

import numpy as np
import pytest
import torch

from rollout_engine.base.messages import ModelRunnerOutput, NewSequence
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.model.sampling import logit_rows
from rollout_engine.model.sampling.draw_pieces import joined, sample_rows
from rollout_engine.model.sampling.logit_edits import LogitEdits
from rollout_engine.model.sampling.logit_rows import LogitRows, row_pieces
from rollout_engine.model.sampling.row_edits import RowEdits
from rollout_engine.model.sampling.sampling_batch import SamplingBatch

VOCAB_SIZE = 300
PARAMS = [
    SamplingParams(logprobs=0, entropy=True),
    SamplingParams(temperature=0.0, logprobs=3, entropy=True),
    SamplingParams(),
    SamplingParams(top_k=5, temperature=0.7, logprobs=1, logprobs_mode="processed"),
    SamplingParams(
        presence_penalty=1.5, logit_bias={7: 5.0}, logprobs=2, logprobs_mode="raw", temperature=0.5, entropy=True
    ),
    SamplingParams(logprob_token_ids=[3, 5]),
    SamplingParams(logprobs=-1),
    SamplingParams(allowed_token_ids=[4, 9], top_p=0.9, logprobs=0, logprobs_mode="processed"),
]


class Head:
    """A head that counts its rows and the most at a time; each row's logits depend on that row alone."""

    def __init__(self, num_rows, dtype=torch.float32, broken=()):
        generator = torch.Generator().manual_seed(1)
        self.logits = (torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 3).to(dtype)
        self.logits[list(broken), 5] = torch.nan
        self.hidden = torch.arange(num_rows)[:, None]
        self.num_rows = self.most = 0

    def __call__(self, hidden):
        self.num_rows, self.most = self.num_rows + len(hidden), max(self.most, len(hidden))
        return self.logits[hidden[:, 0]]

    def rows(self):
        return LogitRows(self.hidden, self, VOCAB_SIZE)


def same(one, other, batch):
    """Whether two outputs are equal in everything that any row has asked for, bit for bit."""
    assert one.token_ids == other.token_ids and one.errors == other.errors
    np.testing.assert_array_equal(one.logprobs, other.logprobs)
    np.testing.assert_array_equal(one.kept_logprob_mass, other.kept_logprob_mass)
    np.testing.assert_array_equal(one.sampled_ranks, other.sampled_ranks)
    np.testing.assert_array_equal(one.entropies, other.entropies)
    assert one.id_logprobs.keys() == other.id_logprobs.keys()
    for row, values in one.id_logprobs.items():
        np.testing.assert_array_equal(values, other.id_logprobs[row])
    for column, expected in zip(one.top_logprobs, other.top_logprobs, strict=True):
        assert column.shape == expected.shape
        for row, count in enumerate(batch.num_top.tolist()):
            np.testing.assert_array_equal(column[row, :count], expected[row, :count])
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_distinct", [4, 24])
def test_pieces_give_what_one_draw_gives(monkeypatch, dtype, num_distinct):
    params = [PARAMS[row % len(PARAMS)] for row in range(24)]
    batch = SamplingBatch.from_tasks(params, seeds=list(range(24)), positions=list(range(24)))
    edits = RowEdits()
    for row, each in enumerate(params):
        made = LogitEdits.of(NewSequence(row, [1, 2, 7], 2, each, seed=row), (), VOCAB_SIZE)
        if made is not None:
            edits[row] = made
    places = torch.arange(24) * num_distinct // 24
    whole = sample_rows(Head(num_distinct, dtype, [1]).rows().at(places), batch, edits, VOCAB_SIZE)
    for size in (1, 5, 7, 23, 24, 25):
        monkeypatch.setattr(logit_rows, "_PIECE_NUMEL", size * VOCAB_SIZE)
        head = Head(num_distinct, dtype, [1])
        found = sample_rows(head.rows().at(places), batch, edits, VOCAB_SIZE)
        assert same(found, whole, batch)
        assert head.most <= size and head.num_rows <= num_distinct + 24 // size
        assert num_distinct > size or head.num_rows == num_distinct  # few rows are computed once


def test_rows_that_fit_are_computed_at_once_and_taken_without_a_copy():
    head = Head(6)
    rows = head.rows()
    assert head.num_rows == 6
    assert rows.take(slice(0, 4)).data_ptr() == rows.take(slice(None)).data_ptr()
    assert torch.equal(rows.take(torch.tensor([5, 0, 5])), head.logits[[5, 0, 5]])
    assert head.num_rows == 6
    assert row_pieces(256, 262_144, torch.device("cpu")) == [slice(0, 256)]


def test_many_rows_are_computed_as_they_are_taken(monkeypatch):
    monkeypatch.setattr(logit_rows, "_PIECE_NUMEL", 3 * VOCAB_SIZE)
    head = Head(8)
    rows = head.rows()
    assert head.num_rows == 0
    assert torch.equal(rows.take(slice(2, 4)), head.logits[2:4])
    assert torch.equal(rows.take(torch.tensor([7, 1, 7])), head.logits[[7, 1, 7]])
    assert head.num_rows == 4
    places = torch.tensor([4, 4, 4, 0])
    assert torch.equal(rows.at(places).take(slice(1, 4)), head.logits[[4, 4, 0]])
    assert row_pieces(8, VOCAB_SIZE, torch.device("cpu")) == [slice(0, 3), slice(3, 6), slice(6, 8)]
    assert row_pieces(0, VOCAB_SIZE, torch.device("cpu")) == [slice(0, 0)]


def test_a_column_that_only_some_parts_have_is_empty_elsewhere():
    top = np.ones((2, 3), np.int32), np.zeros((2, 3), np.float32)
    parts = [
        ModelRunnerOutput([1], [-1.0], errors={0: "bad"}),
        ModelRunnerOutput([2, 3], [-2.0, -3.0], [-0.5, -0.25], top, {1: "worse"}, sampled_ranks=np.array([4, 5])),
    ]
    found = joined(parts)
    assert (found.token_ids, found.logprobs, found.kept_logprob_mass) == ([1, 2, 3], [-1, -2, -3], [0, -0.5, -0.25])
    assert found.errors == {0: "bad", 2: "worse"} and found.sampled_ranks.tolist() == [0, 4, 5]
    assert found.top_logprobs[0].tolist() == [[-1] * 3, [1] * 3, [1] * 3] and found.id_logprobs == {}
    bare = joined([ModelRunnerOutput([1], None), ModelRunnerOutput([2], None)])
    assert bare == ModelRunnerOutput([1, 2], None)
