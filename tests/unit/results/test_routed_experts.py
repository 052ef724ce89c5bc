"""Routed experts of samples, gathered from the prompt's rows and one row with each token."""

import numpy as np
import pytest

from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, SequenceEnd
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.results.output_processor import OutputProcessor


@pytest.fixture
def processor():
    return OutputProcessor(None)


def add(processor, **params):
    params = SamplingParams(detokenize=False, **params)
    request = EngineCoreRequest(prompt_token_ids=[5, 6], params=params, max_tokens=9, seed=3, first_sequence_id=40)
    processor.add("r", request, None)


def take(processor, outputs):
    (request,), _ = processor.update(outputs)
    return processor.take(request)


def rows(*experts):
    return np.array(experts, np.uint8).reshape(-1, 1, 2)


def token(token_id, experts, *, index=0, prompt=None, end=None):
    """A step that brought one token to one sample, the experts of the token before it, and perhaps the prompt's."""
    return EngineCoreOutputs(
        0,
        [40 + index],
        [token_id],
        [0],
        ended=[] if end is None else [SequenceEnd(40 + index, end)],
        routed_experts=rows(experts),
        prompt_routed_experts={} if prompt is None else {40: prompt},
    )


@pytest.mark.parametrize("kind, second", [("cumulative", [[0, 1], [2, 3], [4, 5]]), ("delta", [[4, 5]])])
def test_they_begin_with_the_prompts_and_have_a_row_for_each_token_but_the_last(processor, kind, second):
    add(processor, output_kind=kind, return_routed_experts=True)
    output = take(processor, token(74, [2, 3], prompt=rows([0, 1])))
    assert output.outputs[0].routed_experts.tolist() == [[[0, 1]], [[2, 3]]]
    from_another_replica = rows([9, 9])
    output = take(processor, token(75, [4, 5], prompt=from_another_replica, end="length"))
    assert output.finished and output.outputs[0].routed_experts.tolist() == [[row] for row in second]
    assert output.outputs[0].routed_experts.dtype == np.uint8


def test_samples_share_the_prompts_rows_and_have_their_own(processor):
    add(processor, n=2, return_routed_experts=True, output_kind="final_only")
    take(processor, token(74, [2, 3], prompt=rows([0, 1]), end="length"))
    output = take(processor, token(75, [4, 5], index=1, end="length"))
    assert [each.routed_experts[:, 0].tolist() for each in output.outputs] == [[[0, 1], [2, 3]], [[0, 1], [4, 5]]]


def test_who_does_not_ask_gets_none_of_others(processor):
    add(processor)
    output = take(processor, token(74, [4, 5], prompt=rows([0, 1]), end="stop"))
    assert output.outputs[0].routed_experts is None


def test_a_sample_without_tokens_has_none(processor):
    add(processor, return_routed_experts=True)
    output = take(processor, EngineCoreOutputs(0, ended=[SequenceEnd(40, "abort")]))
    assert output.finished and output.outputs[0].routed_experts is None
