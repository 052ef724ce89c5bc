"""Slices of a step's outputs hold every row once, and what belongs to no row once."""

import numpy as np
import pytest

from rollout_engine.base.messages import EngineCoreOutputs, IdLogprobs, SequenceEnd
from rollout_engine.base.sequence_rows import SupportIds
from rollout_engine.process.client_routing import NUM_ROWS, slices


def make_outputs(num_rows, **columns):
    ids = list(range(num_rows))
    return EngineCoreOutputs(
        policy_version=3,
        sequence_ids=ids,
        token_ids=[7 * n for n in ids],
        kv_min_versions=[n % 3 for n in ids],
        ended=[SequenceEnd(0, "stop")],
        num_cached_tokens={1: 16},
        prompt_logprobs={2: "prompt"},
        pooled={9: "pooled"},
        prompt_routed_experts={2: "experts"},
        start_time=9.0,
        **columns,
    )


def make_columns(num_rows):
    numbers = np.arange(num_rows, dtype=np.float32)
    return dict(
        logprobs=list(-numbers),
        kept_logprob_mass=list(-2 * numbers),
        top_logprobs=(np.arange(2 * num_rows, dtype=np.int32).reshape(-1, 2), np.outer(numbers, np.float32([1, 2]))),
        sampled_ranks=np.arange(num_rows, dtype=np.int32),
        routed_experts=np.arange(4 * num_rows, dtype=np.int16).reshape(num_rows, 2, 2),
        id_logprobs=IdLogprobs.of({n: np.full(1 + n % 3, n, np.float32) for n in range(0, num_rows, 5)}),
        supports=SupportIds.of({n: np.full(n % 3, n, np.int32) for n in range(0, num_rows, 7)}),
    )


@pytest.mark.parametrize("num_rows", [NUM_ROWS + 1, 2 * NUM_ROWS, 3 * NUM_ROWS + 7])
def test_slices_hold_every_row_once(num_rows):
    outputs = make_outputs(num_rows, **make_columns(num_rows))
    parts = list(slices(outputs))
    assert [len(part.sequence_ids) for part in parts[:-1]] == [NUM_ROWS] * (len(parts) - 1)
    for name in ("sequence_ids", "token_ids", "kv_min_versions", "logprobs", "kept_logprob_mass"):
        assert [value for part in parts for value in getattr(part, name)] == getattr(outputs, name)
    for i in range(2):
        assert np.array_equal(np.concatenate([part.top_logprobs[i] for part in parts]), outputs.top_logprobs[i])
    assert np.array_equal(np.concatenate([part.sampled_ranks for part in parts]), outputs.sampled_ranks)
    assert np.array_equal(np.concatenate([part.routed_experts for part in parts]), outputs.routed_experts)
    rows = [(s, row.tolist()) for part in parts if part.id_logprobs for s, row in part.id_logprobs.rows()]
    assert rows == [(s, row.tolist()) for s, row in outputs.id_logprobs.rows()]
    rows = [(s, row.tolist()) for part in parts if part.supports for s, row in part.supports.rows()]
    assert rows == [(s, row.tolist()) for s, row in outputs.supports.rows()]
    assert {(part.policy_version, part.start_time) for part in parts} == {(3, 9.0)}


def test_what_belongs_to_no_row_comes_once():
    first, *others, last = slices(make_outputs(3 * NUM_ROWS))
    assert (first.num_cached_tokens, first.prompt_logprobs, first.ended) == ({1: 16}, {2: "prompt"}, [])
    assert first.pooled == {9: "pooled"} and not any(part.pooled for part in (*others, last))
    assert [part.prompt_routed_experts for part in (first, *others, last)] == [{2: "experts"}, {}, {}]
    assert last.ended == [SequenceEnd(0, "stop")]
    assert not any(part.num_cached_tokens or part.prompt_logprobs for part in (*others, last))
    assert not any(part.ended for part in others)
    assert first.logprobs is first.top_logprobs is first.sampled_ranks is first.id_logprobs is None


@pytest.mark.parametrize("num_rows", [0, NUM_ROWS])
def test_few_rows_are_not_divided(num_rows):
    outputs = make_outputs(num_rows)
    assert list(slices(outputs)) == [outputs]
