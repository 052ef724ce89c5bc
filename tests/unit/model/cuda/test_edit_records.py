"""Edits of logits on a device beside the definition: every bit, while tokens that the host does not know come in."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_engine import SamplingParams
from rollout_engine.kernels.triton.logit_edits import edit
from rollout_engine.model.cuda.edit_records import EditRecords
from rollout_engine.model.sampling.logit_edits import LogitEdits
from tests.unit.model.edits_defined import VOCAB_SIZE, sequence, slow_edit, some_params, tokens

CONTEXT = 40
any_sequence = st.tuples(
    some_params, tokens, st.lists(st.integers(0, 5), max_size=4), st.lists(st.integers(0, 5), min_size=3, max_size=3)
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    sequences=st.lists(any_sequence, min_size=1, max_size=4),
    bad_words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@pytest.mark.slow
def test_any_mix_of_rows_has_the_bits_of_the_definition_as_tokens_are_drawn(device, seed, sequences, bad_words, dtype):
    records = EditRecords(VOCAB_SIZE, CONTEXT, torch.device(device))
    generator = torch.Generator().manual_seed(seed)
    of = [sequence(prompt, known, params=params, bad_words=bad_words) for params, prompt, known, _ in sequences]
    edits = [LogitEdits(each, (), VOCAB_SIZE) for each in of]
    for index, each in enumerate(of):
        each.sequence_id = index
    last_tokens = torch.full((9,), -7, device=device)
    places = torch.arange(len(of)).flip(0).to(device) * 2
    rows = (torch.arange(len(of)) + 1).to(device)
    drawn = [each[-1] for each in sequences]
    for step in range(4):
        logits = (torch.randn(len(of) + 1, VOCAB_SIZE, generator=generator) * 4).to(dtype)
        logits[0] = torch.nan  # of a row that is not edited
        addresses = torch.from_numpy(records.addresses(edits)).to(device)
        positions = torch.tensor([len(each.token_ids) for each in of], device=device)
        edited = torch.empty(len(of), VOCAB_SIZE + 9, device=device)[:, :VOCAB_SIZE]
        for _ in range(1 + step % 2):  # a step that is done again
            edit(logits.to(device), rows, addresses, last_tokens, places, positions, edited)
            expected = torch.stack([slow_edit(row, each) for row, each in zip(logits[1:], of, strict=True)])
            assert edited.cpu().numpy().tobytes() == expected.numpy().tobytes()
        if step < 3:
            for each, come in zip(of, drawn, strict=True):
                each.token_ids.append(come[step])
            last_tokens[places] = torch.tensor([come[step] for come in drawn], device=device)


def test_lists_longer_than_a_program_takes_at_once_are_walked_through(device):
    biases = {token: token / 100 for token in range(0, 3000, 3)}
    params = SamplingParams(logit_bias=biases, frequency_penalty=0.3, repetition_penalty=1.3)
    of = sequence([*range(2000), 7, 7], [*range(1500, 4000, 2), 1500], params=params)
    of.bad_words = [[token + 1, token] for token in range(1498, 3000)]
    records = EditRecords(5000, 6000, torch.device(device))
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(3)).to(device)
    edited, zero = torch.empty_like(logits), torch.zeros(1, dtype=torch.int64, device=device)
    edits = LogitEdits(of, (), 5000)
    for drawn in (4999, 1500):
        addresses = torch.from_numpy(records.addresses([edits])).to(device)
        of.token_ids.append(drawn)
        position = torch.tensor([len(of.token_ids)], device=device)
        edit(logits, zero, addresses, torch.tensor([drawn], device=device), zero, position, edited)
        expected = logits[0].cpu().clone()
        assert LogitEdits(of, (), 5000).apply(expected) is None
        assert np.array_equal(edited[0].cpu().numpy().view(np.int32), expected.numpy().view(np.int32))
