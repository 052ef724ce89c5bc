"""The outputs of a step have the sequences that gained a token, and none that failed or had ended before."""

from types import SimpleNamespace

import numpy as np
import pytest

from rollout_engine.base.messages import EngineCoreOutputs, ModelRunnerOutput
from rollout_engine.core.result_processor import fill_columns


def sampled(count, ended=()):
    return [SimpleNamespace(sequence_id=40 + i, kv_min_version=i, ended=i in ended) for i in range(count)]


def result(count, failed=()):
    rows = np.arange(count)
    return ModelRunnerOutput(
        token_ids=rows.tolist(),
        logprobs=(-1.0 * rows).tolist(),
        top_logprobs=(rows[:, None].astype(np.int32), rows[:, None].astype(np.float32)),
        errors=dict.fromkeys(failed, "broken"),
        sampled_ranks=rows.astype(np.int32),
        id_logprobs={row: np.full(row + 1, row, np.float32) for row in range(1, count, 2) if row not in failed},
    )


@pytest.mark.parametrize(
    "ended, failed, kept", [((), (), range(6)), ((1,), (4,), (0, 2, 3, 5)), ((1, 3, 5), (), (0, 2, 4))]
)
def test_columns_hold_the_rows_that_gained_a_token(ended, failed, kept):
    outputs = EngineCoreOutputs(0)
    fill_columns(outputs, sampled(6, ended), result(6, failed))
    kept = list(kept)
    assert outputs.sequence_ids == [40 + row for row in kept]
    assert outputs.token_ids == kept and outputs.sampled_ranks.tolist() == kept
    assert outputs.top_logprobs[0][:, 0].tolist() == kept
    found = {} if outputs.id_logprobs is None else dict(outputs.id_logprobs.rows())
    assert {s: row.tolist() for s, row in found.items()} == {40 + r: [r] * (r + 1) for r in kept if r % 2}
