"""Supports of samples: streamed, whole, and ended where they exceed their share."""

import numpy as np
import pytest

from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, SequenceEnd
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.sequence_rows import SupportIds
from rollout_engine.results.output_processor import OutputProcessor

ROWS = [[3, 74], [], [5, 6, 74]]


@pytest.fixture
def processor():
    return OutputProcessor(None)


def add(processor, **params):
    params = SamplingParams(detokenize=False, **params)
    request = EngineCoreRequest(prompt_token_ids=[5, 6], params=params, max_tokens=9, seed=3, first_sequence_id=40)
    processor.add("r", request, None)


def step(ids, *, index=0, end=None):
    """A step that brought one token to one sample, drawn from these ids."""
    supports = None if ids is None else SupportIds.of({40 + index: np.int32(ids)})
    ended = [] if end is None else [SequenceEnd(40 + index, end)]
    return EngineCoreOutputs(0, [40 + index], [74], [0], ended=ended, supports=supports)


def outputs_of(processor, steps):
    found = []
    for each in steps:
        for request in processor.update(each)[0]:
            if (output := processor.take(request)) is not None:
                found.append(output)
    return found


def lists(sample):
    offsets, ids = sample.support
    assert offsets.dtype == np.int64 and ids.dtype == np.int32 and offsets[0] == 0
    return [ids[a:b].tolist() for a, b in zip(offsets[:-1], offsets[1:], strict=True)]


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("cumulative", [ROWS[:1], ROWS[:2], ROWS]),
        ("delta", [ROWS[:1], ROWS[1:2], ROWS[2:]]),
        ("final_only", [ROWS]),
    ],
)
def test_each_kind_of_output_has_a_row_for_each_of_its_tokens(processor, kind, expected):
    add(processor, output_kind=kind, return_support=True)
    steps = [step(ids, end="length" if ids == ROWS[-1] else None) for ids in ROWS]
    found = outputs_of(processor, steps)
    assert [lists(output.outputs[0]) for output in found] == expected


def test_samples_that_do_not_ask_get_none_of_others(processor):
    add(processor)
    assert outputs_of(processor, [step([3], end="stop")])[-1].outputs[0].support is None


def test_a_sample_without_tokens_has_no_rows(processor):
    add(processor, return_support=True)
    [output] = outputs_of(processor, [EngineCoreOutputs(0, ended=[SequenceEnd(40, "abort")])])
    assert lists(output.outputs[0]) == []


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
def test_a_sample_whose_rows_exceed_its_share_ends_with_an_error_and_keeps_them(monkeypatch, processor, kind):
    monkeypatch.setattr("rollout_engine.base.support.MAX_SUPPORT_IDS", 8)
    add(processor, n=2, output_kind=kind, return_support=True)
    processor.update(step([1, 2, 3, 4]))
    requests, ended = processor.update(step([5]))
    assert ended == [40]
    processor.update(step([9], index=1, end="length"))
    first, second = processor.take(requests[0]).outputs
    assert (first.finish_reason, second.finish_reason) == ("error", "length")
    assert "drawn from 5 ids in all, and a sample may return 4 of them" in first.error
    assert lists(first) == [[1, 2, 3, 4], [5]] and lists(second) == [[9]]
