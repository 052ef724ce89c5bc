"""Samples that were begun in an earlier process: restored from their parts they end like those of one process."""

import numpy as np
import pytest

from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, IdLogprobs, SequenceEnd
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.sequence_rows import SupportIds
from rollout_engine.results.output_processor import OutputProcessor
from tests.unit.results.test_output_processor import FIRST_SEQUENCE

EVERYTHING = {
    "logprobs": 2,
    "top_p": 0.5,
    "entropy": True,
    "logprob_token_ids": [3, 7],
    "return_routed_experts": True,
    "return_support": True,
}
TEXT = b"hello, stop there and more"


def begin(codec, **params):
    made = SamplingParams(n=2, output_kind="final_only", **params)
    request = EngineCoreRequest(
        prompt_token_ids=[5, 6, 7], params=made, max_tokens=99, seed=3, first_sequence_id=FIRST_SEQUENCE
    )
    processor = OutputProcessor(codec)
    return processor, processor.add("r", request, "prompt")


def step(place, *, ends=None, everything=True):
    """A step in which both samples gain a token; sample 0 ends in it if `ends` says how."""
    ids = [FIRST_SEQUENCE, FIRST_SEQUENCE + 1]
    rows = {
        "kept_logprob_mass": [-0.25 * place, -0.5],
        "top_logprobs": (np.array([[place, 1], [2, 3]], np.int32), np.full((2, 2), -place, np.float32)),
        "sampled_ranks": np.array([1, 2], np.int32),
        "routed_experts": np.full((2, 1, 2), place, np.uint8),
        "prompt_routed_experts": {FIRST_SEQUENCE: np.ones((2, 1, 2), np.uint8)},
        "entropies": np.array([place, 0.5], np.float32),
        "supports": SupportIds.of({id: np.arange(place % 3, dtype=np.int32) for id in ids}),
        "id_logprobs": IdLogprobs.of({id: np.array([-place, -1], np.float32) for id in ids}),
    }
    return EngineCoreOutputs(
        place // 5,
        ids,
        [TEXT[place] + 3, TEXT[-place - 1] + 3],
        [place // 10, place // 5],
        logprobs=[-0.1 * place, -0.2],
        ended=[SequenceEnd(FIRST_SEQUENCE, ends)] if ends else [],
        **(rows if everything else {}),
    )


def assert_same(one, other):
    for name in one.__struct_fields__:
        a, b = ([*each] if isinstance(each, tuple) else [each] for each in (getattr(one, name), getattr(other, name)))
        for x, y in zip(a, b, strict=True):
            if isinstance(x, np.ndarray):
                assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes(), name
            else:
                assert x == y, name


def finish(processor, steps):
    [request] = processor._requests.values()
    for each in steps:
        processor.update(each)
    processor.update(EngineCoreOutputs(0, ended=[SequenceEnd(FIRST_SEQUENCE + i, "length") for i in range(2)]))
    return processor.take(request).outputs


@pytest.mark.parametrize("params", [{}, EVERYTHING, {"stop": ["stop"]}, {"stop": ["stop", "and"], "logprobs": 0}])
def test_the_rest_behind_any_place_makes_the_same_sample(codec, params):
    everything = params is EVERYTHING
    steps = [step(place, everything=everything) for place in range(len(TEXT))]
    whole = finish(begin(codec, **params)[0], steps)
    for first in range(1, len(TEXT)):
        for second in range(first, len(TEXT), 4):
            earlier, _ = begin(codec, **params)
            parts = []
            for place in range(second):
                earlier.update(steps[place])
                if place + 1 in (first, second):
                    taken = [sum(len(p.token_ids) for p in parts if p.index == i) for i in range(2)]
                    parts += earlier.parts("r", taken, 1)
            later, request = begin(codec, **params)
            live = later.restore(request, parts)
            ended = [i for i in range(2) if FIRST_SEQUENCE + i not in live]
            assert all(whole[i].finish_reason == "stop" for i in ended)
            for one, other in zip(finish(later, steps[second:]), whole, strict=True):
                assert_same(one, other)


def test_parts_are_taken_once_one_sample_has_enough_new_tokens(codec):
    processor, _ = begin(codec)
    assert processor.parts("r", [0, 0], 1) == [] and processor.parts("gone", [0, 0], 1) == []
    for place in range(3):
        processor.update(step(place, everything=False))
    assert processor.parts("r", [0, 0], 4) == []
    assert [len(part.token_ids) for part in processor.parts("r", [0, 2], 3)] == [3, 1]
    assert [part.index for part in processor.parts("r", [0, 3], 3)] == [0]


def test_a_request_whose_samples_had_all_ended_has_nothing_left(codec):
    processor, _ = begin(codec)
    for place in range(3):
        processor.update(step(place, everything=False))
    processor.update(step(3, everything=False))
    ends = [SequenceEnd(FIRST_SEQUENCE, "stop", 9), SequenceEnd(FIRST_SEQUENCE + 1, "length")]
    processor.update(EngineCoreOutputs(0, ended=ends))
    [request] = processor._requests.values()
    parts = processor.parts("r", [0, 0], 1)
    whole = processor.take(request).outputs
    later, again = begin(codec)
    assert later.restore(again, parts) == {}
    for one, other in zip(later.take(again).outputs, whole, strict=True):
        assert_same(one, other)
