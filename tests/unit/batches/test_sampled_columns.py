"""Columns of sampled tokens: entropies, the most likely tokens, hidden states; in both layouts, parts and lines."""

import json
import random

import numpy as np
import pytest
import torch

from rollout_engine import concat, minibatches
from rollout_engine.base.outputs import RequestOutput
from rollout_engine.batches.jsonl import samples, to_jsonl
from rollout_engine.batches.output_samples import output_samples
from rollout_engine.batches.rollout_batch import rollout_batch
from tests.unit.batches.conftest import completion

WIDTH = 3


def outputs_of(seed, *, k=2):
    """Requests of which the second asked for nothing."""
    rng, made = random.Random(seed), []
    for number in range(3):
        found = []
        for index in range(2):
            sample = completion(rng, index, rng.randrange(1, 7), False)
            count = len(sample.token_ids)
            if number != 1:
                values = np.random.default_rng(seed + index)
                sample.entropies = values.random(count, np.float32)
                ids = values.integers(0, 90, (count, k)).astype(np.int32)
                sample.top_logprobs = ids, -values.random((count, k), np.float32)
                sample.hidden_states = values.random((count, WIDTH), np.float32)
            found.append(sample)
        prompt = [rng.randrange(90) for _ in range(rng.randint(1, 6))]
        made.append(RequestOutput(str(number), "p", prompt, None, found, True, 0))
    return made


def batch_of(outputs, layout="padded"):
    return rollout_batch(outputs, pad_token_id=99, layout=layout)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_columns_stand_at_the_sampled_tokens(layout):
    outputs = outputs_of(0)
    batch = batch_of(outputs, layout)
    mask, asked = batch["masks", "all_assistant_mask"], [outputs[0], outputs[2]]
    entropies = np.concatenate([sample.entropies for output in asked for sample in output.outputs])
    found = batch["entropy", "full"]
    assert found.shape == mask.shape and not found[~mask].any()
    assert found[mask][found[mask] != 0].tolist() == entropies[entropies != 0].tolist()
    ids, values = batch["top_k", "ids"], batch["top_k", "log_probs"]
    assert ids.dtype == torch.int64 and ids.shape == values.shape == (*mask.shape, 2)
    assert bool((ids[~mask] == -1).all()) and bool((values[~mask] == -torch.inf).all())
    assert ids[(ids >= 0).all(-1)].tolist() == [
        row for output in asked for sample in output.outputs for row in sample.top_logprobs[0].tolist()
    ]
    states = batch["hidden_states"]
    assert states.shape == (*mask.shape, WIDTH) and not states[~mask].any()


def test_states_of_prompts_stand_one_token_later():
    output = outputs_of(1)[0]
    count = len(output.prompt_token_ids) * WIDTH
    output.prompt_hidden_states = np.arange(1, count + 1, dtype=np.float32).reshape(-1, WIDTH)
    states = batch_of([output])["hidden_states"]
    for row, sample in enumerate(output.outputs):
        start = len(output.prompt_token_ids)
        assert not states[row, 0].any()
        np.testing.assert_array_equal(states[row, 1:start], output.prompt_hidden_states[:-1])
        np.testing.assert_array_equal(states[row, start : start + len(sample.token_ids)], sample.hidden_states)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_parts_and_sums_keep_them(layout):
    one, other = batch_of(outputs_of(2), layout), batch_of(outputs_of(3, k=4), layout)
    whole = concat([one, other])
    assert whole["top_k", "ids"].shape[-1] == 4
    mask = whole["masks", "all_assistant_mask"]
    for key in (("entropy", "full"), "hidden_states", ("top_k", "ids")):
        width = one[key].shape[2:][-1:] if key == ("top_k", "ids") else None
        parts = [each[key][each["masks", "all_assistant_mask"]] for each in (one, other)]
        found = whole[key][mask]
        assert torch.equal(found[len(parts[0]) :], parts[1])
        first = found[: len(parts[0])]
        assert torch.equal(first if width is None else first[:, : width[0]], parts[0])
        assert not bool((whole[key][~mask] > 0).any())
    assert bool((whole["top_k", "log_probs"][~mask] == -torch.inf).all())
    again = concat(minibatches(whole, 5))
    for key in (("entropy", "full"), "hidden_states", ("top_k", "ids"), ("top_k", "log_probs")):
        assert torch.equal(again[key], whole[key])


def test_lines_have_entropies_and_the_most_likely(tmp_path):
    outputs = outputs_of(4)
    outputs[0].outputs[0].top_logprobs[1][0, 1] = -np.inf
    batch = batch_of(outputs)
    lines = list(samples(batch))
    for output, first in zip(outputs, (0, 2, 4), strict=True):
        mine = list(output_samples(output, first // 2, {}, None, {}))
        for theirs, line in zip(mine, lines[first : first + 2], strict=True):
            if output is outputs[1]:
                assert "entropy" not in theirs and not any(line["entropy"]) and not any(line["top_k"])
            else:
                assert theirs["entropy"] == line["entropy"] and theirs["top_k"] == line["top_k"]
    assert lines[0]["top_k"][0][1][1] is None
    to_jsonl(batch, tmp_path / "rollout.jsonl")
    written = (tmp_path / "rollout.jsonl").read_text().splitlines()
    assert [json.loads(line)["top_k"] for line in written] == [line["top_k"] for line in lines]
