import numpy as np
import pytest

from rollout_engine.model.cpu.flat_batch import FlatBatch, SequenceChunk

MIXED = [SequenceChunk([7, 8, 9], 0, [4]), SequenceChunk([5], 33, [1, 2, 3]), SequenceChunk([6, 2], 15, [9, 0])]


@pytest.mark.parametrize(
    "chunks", [MIXED, MIXED[1:2], [SequenceChunk([i], i, [i, i + 1][: i // 16 + 1]) for i in (0, 16)]]
)
def test_a_flat_batch_holds_its_chunks(chunks):
    batch = FlatBatch.of(chunks)
    assert batch.chunks(16) == chunks
    assert batch.token_ids.tolist() == [t for chunk in chunks for t in chunk.token_ids]
    positions = [c.num_computed_tokens + i for c in chunks for i in range(len(c.token_ids))]
    assert (batch.positions.tolist(), batch.positions.dtype) == (positions, np.int64)
