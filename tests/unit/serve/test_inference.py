import asyncio

import numpy as np
import pytest

from rollout_engine import SamplingParams

PATH = "/inference/v1/generate"
PROMPT = [5, 6, 7]


def body(**sampling):
    return {"model": "tiny", "token_ids": PROMPT, "sampling_params": {"max_tokens": 6, **sampling}}


def test_tokens_and_log_probs_are_those_of_the_policy_to_the_bit(policy, client):
    found = client.post(PATH, {**body(seed=11, logprobs=1, n=2), "request_id": "mine"})
    assert found["request_id"] == "mine" and found["weight_version"] == policy.policy_version
    assert found["usage"]["prompt_tokens"] == 3 and found["usage"]["completion_tokens"] == 12
    version = policy.policy_version
    for index, choice in enumerate(found["choices"]):
        batch = policy.rollout([PROMPT], SamplingParams(seed=choice["seed"], max_tokens=6, logprobs=0), use_tqdm=False)
        assert choice["index"] == index and choice["token_ids"] == batch["tokens", "response"][0].tolist()
        content = choice["logprobs"]["content"]
        values = np.array([entry["logprob"] for entry in content], np.float32)
        assert values.tobytes() == batch["log_probs", "response"][0].numpy().tobytes()
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["finish_reason"] == "length" and choice["stop_reason"] is None
        assert choice["weight_versions"] == [{"version": str(version), "start": 0, "end": 6}]
        assert choice["version_spans"] == [[0, 6, version, version]] and choice["weight_version"] == version


def test_each_token_has_its_rank_and_the_most_likely_ones_in_their_order(client):
    [choice] = client.post(PATH, body(seed=2, logprobs=3, logprob_token_ids=[9, 10]))["choices"]
    for entry in choice["logprobs"]["content"]:
        top, asked = entry["top_logprobs"][:3], entry["top_logprobs"][3:]
        assert [each["rank"] for each in top] == [1, 2, 3]
        assert [each["logprob"] for each in top] == sorted((each["logprob"] for each in top), reverse=True)
        assert {9, 10} <= {each["token_id"] for each in top + asked} and len(asked) <= 2
        same = [each for each in top if each["token_id"] == entry["token_id"]]
        assert (entry["rank"] <= 3) == bool(same) and all(each["logprob"] == entry["logprob"] for each in same)


def test_no_log_probs_come_unasked(client):
    found = client.post(PATH, {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}})
    assert found["choices"][0]["logprobs"] is None and found["prompt_logprobs"] is None


def test_log_probs_of_the_prompt_have_vllms_shape(client):
    first, *rows = client.post(PATH, body(prompt_logprobs=1))["prompt_logprobs"]
    [scored] = asyncio.run(client.app.served.engine.score([PROMPT[:1]], [PROMPT[1:]]))
    assert first is None and [row[str(token)]["logprob"] for token, row in zip(PROMPT[1:], rows, strict=True)] == [
        float(value) for value in scored
    ]


def test_a_stream_gives_the_same_as_a_whole_response(client):
    asked = {**body(seed=4, logprobs=1, n=2, prompt_logprobs=0), "return_token_ids": True}
    whole = client.post(PATH, asked)
    *events, last = client.events(PATH, {**asked, "stream_options": {"include_usage": True}})
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"] == PROMPT
    assert events[0]["prompt_logprobs"] == whole["prompt_logprobs"]
    for choice in whole["choices"]:
        parts = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        assert sum((part["token_ids"] for part in parts), []) == choice["token_ids"]
        assert sum((part["logprobs"]["content"] for part in parts), []) == choice["logprobs"]["content"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


def test_stop_strings_and_ids_end_it_though_no_text_is_made(client):
    [whole] = client.post(PATH, body(seed=4))["choices"]
    third = whole["token_ids"][2]
    [ended] = client.post(PATH, body(seed=4, stop_token_ids=[third], skip_special_tokens=False))["choices"]
    assert ended["token_ids"] == whole["token_ids"][: whole["token_ids"].index(third) + 1]
    assert ended["finish_reason"] == "stop" and ended["stop_reason"] == third
    text = client.post("/detokenize", {"tokens": whole["token_ids"]})["prompt"]
    [cut] = client.post(PATH, body(seed=4, stop=[text[1:3]]))["choices"]
    assert cut["finish_reason"] == "stop" and cut["stop_reason"] == text[1:3]


@pytest.mark.parametrize(
    "more",
    [
        {"features": None, "sampling_params": {"max_tokens": 1, "output_kind": 2}},
        {"priority": 1, "cache_salt": "step-3", "features": {}},
        {"sampling_params": {"max_tokens": 1, "flat_logprobs": True, "detokenize": False, "structured_outputs": None}},
        {"sampling_params": {"max_tokens": 1, "logprobs": 3, "extra_args": {"prl_compact_logprobs": True}}},
    ],
)
def test_what_clients_of_vllm_send_beside_it_is_taken(client, more):
    assert client.post(PATH, {**body(), **more})["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    "more, said",
    [
        ({"token_ids": []}, "token_ids=[] is not allowed"),
        ({"token_ids": "5"}, "token_ids='5' is not allowed: must be an array."),
        ({"tokens": [1]}, "Unknown field 'tokens'. Did you mean 'token_ids'?"),
        ({"features": {"mm_hashes": {}}}, "features={'mm_hashes': {}} is not served"),
        ({"sampling_params": {"temprature": 1}}, "sampling_params: Unknown field 'temprature'"),
        ({"sampling_params": {"temperature": -1}}, "temperature=-1.0 is not allowed"),
        ({"sampling_params": {"structured_outputs": {"regex": "(a"}}}, "unclosed group"),
        ({"sampling_params": {"max_tokens": 10_000}}, "max_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_field(client, more, said):
    assert said in client.problem(PATH, {**body(), **more})["message"]
