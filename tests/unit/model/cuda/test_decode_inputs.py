"""What a step in which every sequence decodes finds in static memory."""

import numpy as np
import pytest
import torch

from rollout_engine.base.messages import NewSequence, ScheduledSequence
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.model.cuda import sequence_rows
from rollout_engine.model.cuda.decode_inputs import DecodeInputs, DecodeStep
from rollout_engine.model.cuda.flat_columns import FlatColumns
from rollout_engine.model.cuda.sequence_rows import SequenceRows


@pytest.mark.parametrize("num_blocks", [3, 7], ids=["travel with the step", "are too many and travel before it"])
def test_new_blocks_reach_the_batch_and_stay(device, num_blocks):
    rows = SequenceRows(8, torch.device(device))
    rows.add([7, 0, 1])
    inputs = DecodeInputs(4, 4, rows)
    known = {number: NewSequence(number, [5, 6, 7], 3, SamplingParams(), seed=0) for number in (0, 1)}
    where = rows.rows([0, 1])
    rows.last_tokens[torch.from_numpy(where).to(device)] = torch.tensor([70, 71], device=device)
    blocks = [list(range(20, 20 + num_blocks)), list(range(40, 40 + num_blocks))]
    for position, new in ((2, True), (3, False)):  # the last of the prompt, then a token that the host does not know
        step = [ScheduledSequence(number, position, 1, blocks[number] if new else []) for number in (0, 1)]
        changes = rows.learn(step)
        flat = FlatColumns.of(step, known, where, rows.matrix, 4)
        inputs.put(DecodeStep(flat, None, None, changes), 3)
        batch = inputs.batch(3, has_prefixes=False)
        assert batch.token_ids.tolist() == ([7, 7, 0] if new else [70, 71, 0])
        assert batch.positions[:2].tolist() == [position] * 2
        assert batch.slots.tolist() == [20 * 4 + position, 40 * 4 + position, -1]
        assert batch.attention.context_lens.tolist() == [position + 1, position + 1, 0]
        assert batch.attention.block_tables[:2, 0].tolist() == [20, 40]
        padding = [0, 1.0, 0.0, 1.0, 0, 0, 0, False, -1]  # cuts nothing, draws at temperature 1, writes no token
        assert [[each.item() for each in column] for column in inputs.draws(3).flat] == [[each] * 3 for each in padding]
        np.testing.assert_array_equal(rows.tables_on_device.cpu(), rows.matrix)


def test_last_tokens_keep_their_memory_while_rows_are_added_and_their_values_when_it_is_too_small(device, monkeypatch):
    monkeypatch.setattr(sequence_rows, "_TOKENS", 128)
    rows = SequenceRows(2, torch.device(device))
    first = rows.last_tokens
    rows.add(range(128))
    assert rows.last_tokens is first and len(rows.tables_on_device) == 128
    first[:] = torch.arange(128, device=device)
    rows.add([128])
    assert rows.last_tokens[:128].tolist() == list(range(128))
    assert len(rows.last_tokens) == len(rows.tables_on_device) == 256
