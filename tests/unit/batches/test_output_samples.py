"""Samples of outputs are those that the TensorDict of the same outputs gives."""

import json
import random

import pytest

from rollout_engine import RequestError
from rollout_engine.base.outputs import RequestOutput
from rollout_engine.batches.jsonl import line_of, samples
from rollout_engine.batches.output_samples import output_samples
from rollout_engine.batches.rollout_batch import rollout_batch
from tests.unit.batches.conftest import completion

COLUMNS = {"answer": {"gold": [1, "ä"]}, "level": 3, "none": None, "tags": ["a", "b"], "x": 0.1}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("rewarded", [False, True])
def test_samples_of_outputs_are_those_of_their_batch(seed, kept, rewarded):
    rng = random.Random(seed)
    outputs = [completion(rng, index, rng.randrange(9), kept) for index in range(3)]
    output = RequestOutput("0", "prompt", [1, 2, 3], None, outputs, True, 0)
    rewards = [rng.random() for _ in outputs] if rewarded else None
    by_function = {"long": [0.1, None, 1 / 3], "short": [1.0, 2.0, None]} if rewarded else {}
    batch = rollout_batch(
        [output],
        pad_token_id=0,
        group_ids=[7],
        columns={name: [value] for name, value in COLUMNS.items()},
        rewards=[rewards] if rewarded else None,
        function_rewards={name: [values] for name, values in by_function.items()},
    )
    found = list(output_samples(output, 7, COLUMNS, rewards, by_function))
    lines, expected = ([line_of(sample) for sample in each] for each in (found, samples(batch)))
    assert [*map(json.loads, lines)] == [*map(json.loads, expected)]


def test_samples_without_log_probs_are_refused():
    sample = completion(random.Random(0), 0, 3, False)
    sample.logprobs = None
    with pytest.raises(RequestError, match="logprobs=0"):
        list(output_samples(RequestOutput("0", "p", [1], None, [sample], True, 0), 0, {}, None, {}))
