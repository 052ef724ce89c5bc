"""Entropies and hidden states over HTTP, in our own fields and in SGLang's."""

import base64

import numpy as np
import pytest

from rollout_engine import LLM, SamplingParams

PROMPT = list(range(5, 12))


@pytest.fixture(scope="module")
def expected(policy):
    params = SamplingParams(
        max_tokens=6, seed=3, ignore_eos=True, entropy=True, return_hidden_states="all", detokenize=False
    )
    return LLM.from_engine(policy.engine).generate([PROMPT], params, use_tqdm=False)[0]


def decoded(fields):
    return np.frombuffer(base64.b64decode(fields["data"]), fields["dtype"]).reshape(fields["shape"])


def check(choice, expected):
    (sample,) = expected.outputs
    assert choice["entropies"] == sample.entropies.tolist()
    assert np.array_equal(decoded(choice["hidden_states"]), sample.hidden_states)
    assert np.array_equal(decoded(choice["prompt_hidden_states"]), expected.prompt_hidden_states)


def test_choices_carry_them(client, expected):
    asked = {"max_tokens": 6, "seed": 3, "ignore_eos": True, "entropy": True, "return_hidden_states": "all"}
    check(client.post("/v1/completions", {"prompt": PROMPT, **asked})["choices"][0], expected)
    body = {"token_ids": PROMPT, "sampling_params": asked}
    check(client.post("/inference/v1/generate", body)["choices"][0], expected)
    events = [event["choices"][0] for event in client.events("/inference/v1/generate", body) if event["choices"]]
    (sample,) = expected.outputs
    assert [each for event in events for each in event["entropies"]] == sample.entropies.tolist()
    parts = [decoded(event["hidden_states"]) for event in events if "hidden_states" in event]
    assert np.array_equal(np.concatenate(parts), sample.hidden_states)
    assert ["prompt_hidden_states" in event for event in events] == [True] + [False] * (len(events) - 1)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "entropy": True}
    assert len(client.post("/v1/chat/completions", chat)["choices"][0]["entropies"]) <= 3


def test_sglangs_route_has_them_in_meta_info(client, expected):
    sampling = {"max_new_tokens": 6, "sampling_seed": 3, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_entropy": True, "return_hidden_states": True}
    meta = client.post("/generate", body)["meta_info"]
    (sample,) = expected.outputs
    assert meta["output_token_entropy"] == sample.entropies.tolist()
    first, *others = meta["hidden_states"]
    assert len(others) + 1 == meta["completion_tokens"] == 6
    assert np.array_equal(np.array(first, np.float32), expected.prompt_hidden_states)
    assert np.array_equal(np.array(others, np.float32), sample.hidden_states[1:])


def test_nothing_comes_unasked(client):
    choice = client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})["choices"][0]
    assert not {"entropies", "hidden_states", "prompt_hidden_states"} & choice.keys()
    meta = client.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}})["meta_info"]
    assert not {"output_token_entropy", "hidden_states"} & meta.keys()
